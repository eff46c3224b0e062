"""Lossy compression of gradients as a knob: which kinds a job has, and that they are for who allows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from dpro_search.collect.trace import TensorInfo
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.costmodel.powersgd import factor_elements
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, PlanningFacts, grid
from dpro_search.space.transformations.parameter_servers import in_priority_slices


class GradientCompression(Knob):
    """Gradients in one of the ways that a kind of job knows."""

    name = "compression"
    fields = ("compression",)

    def __init__(self, job: PlanningFacts, known: Sequence[str], *, allow_lossy: bool, refused: str | None = None) -> None:
        """`known` are the values of the field; `refused` says why this job can have none of them (None: it can)."""
        Knob.__init__(self, job)  # one of them also has a graph, which its own initialiser takes
        self._known = tuple(known)
        self._allowed = allow_lossy
        self._refused = refused

    def legal(self, plan: Plan) -> str | None:
        if plan.compression is None:
            return None
        if plan.compression not in self._known:
            return f"compression '{plan.compression}': {self.job.name} has {', '.join(self._known)}"
        if (why := self._refusal(plan.compression)) is not None:
            return f"compression: {why}"
        return None if self._allowed else f"compression '{plan.compression}' changes the numbers; only with --allow-lossy"

    @cached_property
    def choice(self) -> Choice:
        grids: dict[str, tuple[dict[str, object], ...]] = {RECORDED: ({},)}
        possible = [kind for kind in self._known if self._allowed and self._refusal(kind) is None]
        return Choice(
            name=self.name,
            fields=self.fields,
            grids=grids | ({"set": grid("compression", possible)} if possible else {}),
        )

    def _refusal(self, compression: str) -> str | None:
        """Why this job cannot have a kind that it knows."""
        return self._refused


class ProfiledDdpCompression(GradientCompression):
    """A profiled job of PyTorch's DistributedDataParallel, by one of its communication hooks.

    Float32 buckets are sent in half precision (``fp16_compress_hook``, ``bf16_compress_hook``), or by PowerSGD.
    """

    def __init__(
        self, job: PlanningFacts, *, allow_lossy: bool, on_gpus: bool, refused: str | None = None, unshaped: str | None = None
    ) -> None:
        """`on_gpus`: whether NCCL reduces. `unshaped`: why the shapes of the gradients are not known (None: they are)."""
        self._on_gpus, self._unshaped = on_gpus, unshaped
        super().__init__(job, ("fp16", "bf16", *POWERSGD), allow_lossy=allow_lossy, refused=refused)

    def _refusal(self, compression: str) -> str | None:
        if self._refused is not None:
            return self._refused
        if compression == "bf16" and not self._on_gpus:
            return "PyTorch's bf16_compress_hook needs NCCL, and this job was profiled on CPUs; fp16 has no such need"
        if compression not in POWERSGD:
            return None
        if self._on_gpus:
            return "what PowerSGD computes was measured on CPUs, and this job was profiled on GPUs"
        return self._unshaped or powersgd_refusal(self.job.tensors, POWERSGD[compression])


class DdpCompression(GradientCompression):
    """PyTorch's DistributedDataParallel, by a communication hook: float32 buckets in half precision, or PowerSGD.

    PowerSGD (Vogels et al. 2019) sends factors of rank 4, 2 or 1 in place of gradients that are more than twice as large.
    """

    def __init__(self, job: PlanningFacts, recorded_share: float, hook: str = "") -> None:
        """`recorded_share` is that of the gradients' bytes which the recorded buckets moved: below 1, a hook compressed them.

        `hook` is the name of the recorded job's own, if it had one.
        """
        named = f"the communication hook {hook}" if hook else "a communication hook that compresses" if recorded_share < 1 else None
        refused = None if named is None else f"the recorded job has {named}, and a model takes only one"
        super().__init__(job, ("fp16", *POWERSGD), allow_lossy=True, refused=refused)

    def _refusal(self, compression: str) -> str | None:
        if compression not in POWERSGD or self._refused is not None:
            return self._refused
        return powersgd_refusal(self.job.tensors, POWERSGD[compression])


def powersgd_refusal(tensors: Sequence[TensorInfo], rank: int) -> str | None:
    """Why PowerSGD of a rank cannot compress the gradients of a job; None: it can."""
    foreign = sorted({tensor.dtype for tensor in tensors} - {"float32"})
    if foreign:
        return f"what PowerSGD takes is known of float32 gradients, and this job has {foreign[0]}"
    shapeless = next((tensor.name for tensor in tensors if not tensor.shape), None)
    if shapeless is not None:
        return f"PowerSGD's hook takes gradients with a dimension or more, and '{shapeless}' has none"
    if all(factor_elements(tensor, rank) is None for tensor in tensors):
        return f"PowerSGD of rank {rank} would compress no gradient of this job: none is more than twice as large as its factors"
    return None


class BytepsCompression(GradientCompression):
    """MXNet with BytePS: float32 gradients in half precision, by its DistributedTrainer."""

    def __init__(self, job: PlanningFacts, dtypes: Sequence[str], recorded: str = "") -> None:
        """`dtypes` are those of the gradients, `recorded` is how the recorded job's were compressed ("": they were not)."""
        foreign = sorted(set(dtypes) - {"float32"})
        refused = f"what BytePS's casts take is known of float32 gradients, and this job has {foreign[0]}" if foreign else None
        if recorded:
            refused = f"the recorded job's gradients were compressed already ({recorded}): record it without, and search there"
        super().__init__(job, ("fp16",), allow_lossy=True, refused=refused)


class KvstoreCompression(GradientCompression):
    """MXNet's KVStore: 2 bits for an element that a worker pushes. Its priority slices are never compressed (``P3StoreDist``)."""

    def __init__(self, job: PlanningFacts, dtypes: Sequence[str]) -> None:
        """`dtypes` are those of the gradients: KVStore compresses no others than float32."""
        foreign = sorted(set(dtypes) - {"float32"})
        refused = f"MXNet's KVStore compresses float32 gradients only, and this job has {foreign[0]}" if foreign else None
        super().__init__(job, ("2bit",), allow_lossy=True, refused=refused)

    def legal(self, plan: Plan) -> str | None:
        if plan.compression is not None and in_priority_slices(plan, self.job):
            return "compression and p3: MXNet's KVStore does not compress priority slices"
        return super().legal(plan)

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        return plan if in_priority_slices(plan, self.job) else super().propose(plan, rng, hot)

    @cached_property
    def choice(self) -> Choice:
        # A point must be legal by itself: a job with priority slices compresses only in plans that leave these.
        return Choice(name=self.name, fields=self.fields, grids={RECORDED: ({},)}) if self.job.values["p3"] else super().choice
