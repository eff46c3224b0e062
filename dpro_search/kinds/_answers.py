"""Parts of answers (`dpro_search.analysis`) that a kind of job fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.quantities import percent_text, typeset_time_text
from dpro_search.search.objective import StrategyFacts

STEP_PARTS: Mapping[
    str, str
] = {  # parts of a step of a parallel job, in the order in which they are drawn, with their names for people
    "attention": "attention",
    "mlp": "MLP",
    "norms": "norms and residuals",
    "embedding": "embedding",
    "head": "head and loss",
    "convolution": "convolutions",
    "matmul": "matrix products",
    "pointwise": "elementwise ops",
    "gather": "table look-ups",
    "recomputation": "recomputation of activations",
    "compute": "other computation",
    "optimizer": "optimizer",
    "exposed_tensor_parallel": "tensor parallel communication (tp)",
    "exposed_context_parallel": "context parallel communication (cp)",
    "exposed_expert_parallel": "expert parallel communication (ep)",
    "exposed_pipeline_sends": "pipeline communication (pp)",
    "exposed_data_parallel": "data parallel communication (dp)",
    "host": "waiting for the host",
    "bubble": "pipeline bubble",
    "unknown": "unknown",
}


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a plan that a kind of job adds to its prediction. `notes` are sentences."""

    notes: tuple[str, ...] = ()


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change, as ``--set`` takes it, with which a plan fits in memory."""

    change: str
    predicted_iteration_us: float
    peak_memory_bytes: int | None


class ParallelFacts(PlanFacts, frozen=True, kw_only=True):
    """A plan of a described parallel job.

    Attributes
    ----------
    strategy
        Every setting of the strategy.
    computation_us
        Parts of the computation in a step.
    memory_bytes
        Memory of the rank that needs most, by purpose.
    infeasible
        Why the plan does not fit; None: it fits.
    remedies
        The fastest changes with which it would fit.
    """

    strategy: Mapping[str, object]
    computation_us: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    infeasible: str | None
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True, kw_only=True)
class ParallelSetting:
    """One way to run a parallel job.

    Attributes
    ----------
    name
        "as described", or the plan's name.
    parts_us
        The step by the keys of `STEP_PARTS`; the values add up to the step.
    memory_bytes
        Memory of the rank that needs most, by category.
    strategy
        Every setting of the strategy.
    efficiency
        Tokens a second, MFU and price, as `replay` gives them with ``--json``.
    stages
        For each pipeline stage, when it does what: spans of (start, end) in us by the keys "forward", "backward", "update", "comm".
    """

    name: str
    step_us: float
    interval_us: tuple[float, float]
    parts_us: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    limit_bytes: int | None
    strategy: Mapping[str, Any]
    stages: Sequence[Mapping[str, Sequence[tuple[float, float]]]]
    efficiency: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short_name(self) -> str:
        """The name as a column of a table has it: "plan 1"."""
        return self.name.partition(":")[0]

    @property
    def peak_bytes(self) -> float:
        """Memory of the rank that needs most."""
        return sum(self.memory_bytes.values())


class ConvergenceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted convergence model of a training (`costmodel.convergence.Convergence`)."""

    drift: float
    staleness: float
    runs: int


class TrainingFacts(PlanFacts, frozen=True, kw_only=True):
    """A training to a target loss under a synchronisation scheme.

    Attributes
    ----------
    time_to_loss_s
        None: the target is not reached within the limit.
    training_steps, commits, sent_bytes
        Totals over all workers; `sent_bytes` is the key ``bytes`` of JSON.
    waiting_share
        Waiting as a share of all workers' time.
    """

    synchronisation: str
    target_loss: float
    time_to_loss_s: float | None
    training_steps: int
    commits: int
    sent_bytes: int
    waiting_share: float
    convergence: ConvergenceFacts


class ComparedSetting(StrategyFacts, frozen=True, kw_only=True, omit_defaults=True):
    """The setting of a parallel job that plans are compared with.

    Attributes
    ----------
    name
        The whole strategy, in words.
    usual_plan, source
        The plan that people usually take with the job's framework, in words, and who says so; None: the setting was described.
    """

    name: str
    usual_plan: str | None
    source: str | None


class PlanMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a device, what plans may take of it, and the part that a search leaves free; None: not known, or given."""

    device_bytes: int | None
    limit_bytes: int | None
    headroom_pct: float | None


class SearchFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts that a kind of job adds to the result of a search."""

    baseline: ComparedSetting | UnsetType = UNSET
    memory: PlanMemory | UnsetType = UNSET


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded step beside the replay of its own durations."""

    step: int
    measured_us: float
    replayed_us: float
    error_pct: float


def fields_of(part: msgspec.Struct | None) -> dict[str, Any]:  # Any: the fields have different types
    """The fields of a part by name, for the answer that has them as its own; empty for None."""
    return {} if part is None else msgspec.structs.asdict(part)


@dataclass(frozen=True, kw_only=True)
class Term:
    """A fitted number of a cost model, in words."""

    name: str
    value: str
    meaning: str


def cost_terms(costs: CommCosts) -> tuple[Term, ...]:
    """Costs of an all-reduce in the fitted model."""
    negotiation = [float(np.median(waits)) if len(waits) else 0.0 for waits in (costs.negotiate_busy_us, costs.negotiate_idle_us)]
    rows = (
        ("latency, busy ranks", typeset_time_text(costs.alpha_busy_us), "an all-reduce of few bytes while a rank computes"),
        ("latency, large tensors", typeset_time_text(costs.alpha_more_us), "added to a large all-reduce while a rank computes"),
        ("latency, idle ranks", typeset_time_text(costs.alpha_tail_us), "an all-reduce once all ranks have computed"),
        ("transfer, busy ranks", per_byte(costs.beta_busy_us), "time per byte while a rank computes"),
        ("transfer, idle ranks", per_byte(costs.beta_tail_us), "time per byte once all ranks have computed"),
        ("CPU time of a transfer", per_byte(costs.cpu_us), "taken from the compute time of each rank"),
        ("copies in and out", per_byte(costs.copy_in_us + costs.copy_out_us), "into the fusion buffer and back"),
        (
            "negotiation, busy ranks",
            typeset_time_text(negotiation[0]),
            "median, from the start of a cycle to the list of tensors to send",
        ),
        ("negotiation, idle ranks", typeset_time_text(negotiation[1]), "the same while no rank computes"),
        ("between collectives", typeset_time_text(costs.dispatch_us), "callbacks and preparation"),
        ("burst", typeset_time_text(costs.burst_us), "largest lead of an idle link over its rate (token bucket)"),
        ("residual spread", percent_text(costs.residual_pct), "standard deviation of measured over fitted transfers of a step"),
    )
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def link_term(bytes_per_us: float | None) -> Term:
    """The rate of a host's link; None: no limit."""
    value = "no limit" if bytes_per_us is None else f"{bytes_per_us:.0f} MB/s"
    return Term(name="link", value=value, meaning="largest rate at which a host sends or receives")


def per_byte(value_us: float) -> str:
    """Microseconds per byte for people."""
    return f"{value_us * 2**20 / 1e3:.2f} ms/MiB"
