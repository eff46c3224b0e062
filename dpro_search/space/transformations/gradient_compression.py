"""Lossy compression of gradients as a knob: which kinds a job has, and that they are for who allows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Knob, ladder


class GradientCompression(Knob):
    """Gradients in one of the ways that a kind of job knows."""

    name = "compression"
    fields = ("compression",)

    def __init__(self, job: JobFacts, known: Sequence[str], *, allow_lossy: bool, refused: str | None = None) -> None:
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
        if self._refused is not None:
            return f"compression: {self._refused}"
        return None if self._allowed else f"compression '{plan.compression}' changes the numbers; only with --allow-lossy"

    @cached_property
    def choice(self) -> Choice:
        ways: dict[str, tuple[dict[str, object], ...]] = {RECORDED: ({},)}
        possible = self._allowed and self._refused is None
        return Choice(
            name=self.name,
            fields=self.fields,
            ways=ways | ({"set": ladder("compression", self._known)} if possible else {}),
        )


class DdpCompression(GradientCompression):
    """PyTorch's DistributedDataParallel: float32 buckets in half precision, by ``fp16_compress_hook``."""

    def __init__(self, job: JobFacts, recorded_share: float) -> None:
        """`recorded_share` is that of the gradients' bytes which the recorded buckets moved: below 1, a hook compressed them."""
        hooked = "the recorded job has a communication hook that compresses, and a model takes only one"
        super().__init__(job, ("fp16",), allow_lossy=True, refused=hooked if recorded_share < 1 else None)


class KvstoreCompression(GradientCompression):
    """MXNet's KVStore: 2 bits for an element that a worker pushes. Its priority slices are never compressed (``P3StoreDist``)."""

    def __init__(self, job: JobFacts, dtypes: Sequence[str]) -> None:
        """`dtypes` are those of the gradients: KVStore compresses no others than float32."""
        foreign = sorted(set(dtypes) - {"float32"})
        refused = f"MXNet's KVStore compresses float32 gradients only, and this job has {foreign[0]}" if foreign else None
        super().__init__(job, ("2bit",), allow_lossy=True, refused=refused)

    def legal(self, plan: Plan) -> str | None:
        if plan.compression is not None and self._priority(plan):
            return "compression and p3: MXNet's KVStore does not compress priority slices"
        return super().legal(plan)

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        return plan if self._priority(plan) else super().propose(plan, rng, hot)

    @cached_property
    def choice(self) -> Choice:
        # A rung must be legal by itself: a job with priority slices compresses only in plans that leave these.
        return Choice(name=self.name, fields=self.fields, ways={RECORDED: ({},)}) if self.job.values["p3"] else super().choice

    def _priority(self, plan: Plan) -> bool:
        return bool(self.job.values["p3"] if plan.p3 is None else plan.p3)
