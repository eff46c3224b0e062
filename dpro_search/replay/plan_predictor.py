"""`PlanPredictor`: prices plans of any kind of recorded job, and says which plans there are; `plan_predictor` finds the kind.

prices = plan_predictor(Trace.load(folder))
prices.predict(Plan(servers=2)).iteration_us
run_search(prices, space=prices.space, ...)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dpro_search.collect.trace import Floats, TensorInfo, Trace
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import BucketSize, DdpCompression, JobFacts, PlanSpace, Transformation

if TYPE_CHECKING:
    from dpro_search.replay.ddp.predictor import DdpPredictor

COMPUTE = ("op-fusion", "precision", "recomputation", "accumulation")  # transformations that a search tries only where asked for


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What plans may do beyond communication.

    Attributes
    ----------
    compute
        Some of `COMPUTE`.
    allow_lossy
        Also what changes the numbers: compression of gradients, batch normalisation over smaller batches.
    memory_limit_bytes
        Plans that need more than that on a rank are infeasible; None: no limit.
    cluster_model, precision_table
        What fused ops take: a folder of 'dpro-search fit', None: the package's model. What bfloat16 does to ops: a table of
        `costmodel.precision`, which "precision" needs.
    all_reduce_model
        What all-reduces by each of Open MPI's algorithms take, a folder of 'dpro-search fit'; plans of a Horovod job on MPI then
        choose among them. None: all-reduces are as recorded.
    """

    compute: frozenset[str] = frozenset()
    allow_lossy: bool = False
    memory_limit_bytes: int | None = None
    cluster_model: Path | None = None
    precision_table: Path | None = None
    all_reduce_model: Path | None = None

    def __post_init__(self) -> None:
        unknown = self.compute.difference(COMPUTE)
        if unknown:
            raise InputError(f"transformation '{min(unknown)}' is unknown (known: {', '.join(COMPUTE)})")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise InputError(f"the memory limit must be above 0 bytes, not {self.memory_limit_bytes}")


class PlanPredictor(ABC):
    """Prices of plans of one recorded job, deterministic.

    Attributes
    ----------
    tensors
        The communicated tensors, in the order in which they become ready.
    recorded
        Horovod's knobs in the recording (`CommSettings`); None for other kinds of jobs.
    space
        Which plans there are.
    """

    tensors: tuple[TensorInfo, ...]
    recorded: Any = None
    space: PlanSpace
    memory_limit_bytes: int | None = None

    def predict(self, plan: Plan) -> Prediction:
        """What one iteration would cost under a plan; raises `InputError` for a plan that the job cannot follow."""
        self.space.check(plan)
        found, limit = self._predict(plan), self.memory_limit_bytes
        if limit is None or found.peak_memory_bytes is None or found.peak_memory_bytes <= limit:
            return found
        reason = f"needs {found.peak_memory_bytes / 2**20:.0f} MiB, and may have {limit / 2**20:.0f}"
        return msgspec.structs.replace(found, infeasible=reason)

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """Iteration times of replays that differ in luck, [samples]; the same luck for every plan.

        Raises `InputError` if this kind of job is replayed without luck.
        """
        raise InputError(f"{self.space.job.name} is replayed from one duration of each op: there are no quantiles to rank by")

    @abstractmethod
    def _predict(self, plan: Plan) -> Prediction:
        """The price of a legal plan, whatever memory it needs."""


class DdpPlans(PlanPredictor):
    """Bucket sizes of a DistributedDataParallel job, and, where that is asked for, half buckets and modules that run otherwise.

    Parameters
    ----------
    compute
        Some of "precision", which needs the predictor to know ratios, and "recomputation".
    allow_lossy
        Also gradients in fp16 or by PowerSGD.
    """

    def __init__(self, predictor: DdpPredictor, compute: Collection[str] = (), *, allow_lossy: bool = False) -> None:
        from dpro_search.space.transformations.module_precision import ModulePrecision
        from dpro_search.space.transformations.modules import ModuleRecomputation

        self.predictor = predictor
        self.tensors = predictor.tensors
        job, modules = JobFacts(name="a DistributedDataParallel job", tensors=predictor.tensors), predictor.graph.modules
        found: list[Transformation] = [BucketSize(job)]
        if allow_lossy:
            found.append(DdpCompression(job, predictor.graph.compression, predictor.graph.comm_hook))
        if "precision" in compute:
            found.append(ModulePrecision(job, modules, predictor.ratios))
        if "recomputation" in compute:
            found.append(ModuleRecomputation(job, modules))
        self.space = PlanSpace(job, found)

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        return self.predictor.sampled(plan, samples=samples, seed=seed)

    def _predict(self, plan: Plan) -> Prediction:
        return self.predictor.predict(plan)


def plan_predictor(trace: Trace, options: PlanOptions | None = None) -> PlanPredictor:
    """Prices of the plans of a trace's job.

    Raises
    ------
    InputError
        Nothing is known of how such a job communicates, or the options ask for what it does not have.
    GraphError
        The trace cannot be replayed.
    """
    options = options or PlanOptions()
    found = _of_kind(trace, options)
    if options.memory_limit_bytes is not None:
        if found.predict(Plan()).peak_memory_bytes is None:
            raise InputError("the memory limit cannot be kept: the trace does not tell how much memory the job takes")
        found.memory_limit_bytes = options.memory_limit_bytes
    return found


def _of_kind(trace: Trace, options: PlanOptions) -> PlanPredictor:
    if trace.meta.settings is not None:
        from dpro_search.replay.horovod_plans import horovod_plans

        return horovod_plans(trace, options)
    if options.all_reduce_model is not None:
        raise InputError(f"the all-reduce model is for Horovod jobs on Open MPI, and this trace ({trace.meta.format}) is of none")
    if trace.meta.format == "pytorch-ddp":
        return _ddp_plans(trace, options)
    if options.compute:
        raise InputError(
            "only jobs of TensorFlow with Horovod, and of PyTorch's DistributedDataParallel, have plans for compute, and this "
            f"trace ({trace.meta.format}) is of neither"
        )
    if trace.meta.format == "mxnet-kvstore":
        from dpro_search.replay.store_plans import KvstorePlans

        return KvstorePlans.from_trace(trace, allow_lossy=options.allow_lossy)
    if trace.meta.format == "mxnet-byteps":
        from dpro_search.replay.store_plans import BytepsPlans

        return BytepsPlans.from_trace(trace, allow_lossy=options.allow_lossy)
    raise InputError(f"the trace ({trace.meta.format}) is of a job whose knobs are not known: there is nothing to search")


def _ddp_plans(trace: Trace, options: PlanOptions) -> DdpPlans:
    from dpro_search.costmodel.precision import named_model
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.space.transformations.module_precision import unpriced
    from dpro_search.space.transformations.modules import NOT_RECORDED

    unknown = options.compute - {"precision", "recomputation"}
    if unknown:
        raise InputError(
            f"{min(unknown)}: a DistributedDataParallel job has plans for buckets, precision and recomputation "
            "(and compressed gradients), not for that"
        )
    if options.compute and not trace.modules:
        raise InputError(f"{min(options.compute)}: {NOT_RECORDED}")
    predictor, compute = DdpPredictor.from_trace(trace), set(options.compute)
    if "precision" in compute:
        if options.memory_limit_bytes is not None:
            raise InputError(
                "precision: what bfloat16 takes of a DistributedDataParallel job's memory is not known, so that no "
                "memory limit can be kept with it; leave out one of them"
            )
        if (why := unpriced(trace.modules)) is not None:
            raise InputError(f"precision: {why}")
        predictor = predictor.at(ratios=named_model(options.precision_table, "torch"))
    if options.memory_limit_bytes is not None and trace.modules:
        compute.add("recomputation")
    return DdpPlans(predictor, compute, allow_lossy=options.allow_lossy)
