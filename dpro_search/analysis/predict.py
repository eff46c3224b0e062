"""``replay(job, request)``: the predicted iteration of a job, as recorded or changed, beside its measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from dpro_search.analysis.efficiency import efficiency_of, split_options
from dpro_search.collect._files import write_file
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.kinds import Comparison, Job, JobInScenario
from dpro_search.kinds._answers import ConvergenceFacts, PlanFacts, Remedy, ReplayedStep, fields_of
from dpro_search.kinds._comparison import MeasuredIterations
from dpro_search.machine import IntervalSource
from dpro_search.replay.outputs import write_csv
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The scenario to replay, and the files to write."""

    plan: Plan = field(default_factory=Plan)  # Changes of strategy, before `changes`.
    cluster: str | None = None  # The cluster that the job runs on, like ``16xhgx-h100`` or a TOML file; None: as recorded.
    changes: tuple[str, ...] = ()  # Changes as text, like ``cycle_time_us=5ms`` or ``compute=0.9`` (see `space.scenario`).
    # holdout_step, own_durations: Compare a profiled step with its prediction from the others; compare each with the replay of its
    # own durations.
    holdout_step: int | None = None
    own_durations: bool = False
    samples: int | None = None  # Replay so many times with durations drawn anew.
    # perfetto, timeline: Files for ui.perfetto.dev and, as CSV, for tables.
    perfetto: Path | None = None
    timeline: Path | None = None
    on_sample: Callable[[], None] = lambda: None  # Called after each sample.

    @property
    def compares(self) -> bool:
        """Whether profiled steps are compared with their own replay."""
        return self.holdout_step is not None or self.own_durations

    @property
    def changed(self) -> bool:
        """Whether anything but the recorded setting is asked for."""
        return self.plan != Plan() or self.cluster is not None or bool(self.changes)


class OtherCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that a prediction is for, in words, and what the prediction assumes about it."""

    name: str
    left_out: tuple[str, ...]


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of iteration times in us: 5 %, 50 % and 95 %."""

    p5: float
    p50: float
    p95: float

    @classmethod
    def of(cls, times_us: Floats) -> Self:
        """The quantiles of iteration times, [samples]."""
        p5, p50, p95 = np.quantile(times_us, (0.05, 0.5, 0.95)).tolist()
        return cls(p5=p5, p50=p50, p95=p95)


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of the verb `replay`; times in us. JSON leaves out a field that has its default: it does not apply to the job.

    Attributes
    ----------
    measured_us, error_pct
        The measured iteration, and how far the prediction is from it; None if anything was changed, or nothing was measured.
        Of several steps with their own durations, the mean of absolute errors.
    interval_us
        The interval that should hold the measured median in 9 of 10 cases.
    breakdown_us
        Parts of an iteration of the slowest rank.
    ops, replay_seconds
        Number of replayed ops, and how long one replay took.
    settled
        False: the iterations of the replay did not settle, so `iteration_us` is no steady state.
    unplaced
        Recorded ops that have no place in the graph, and why.
    calibration
        What the interval is based on; None: the spread of recorded steps alone.
    baseline_iteration_us, baseline_error_pct
        Of a step that was held out: the mean of the other steps as a prediction of it, and its error.
    steps
        Each recorded step beside a replay with its own durations.
    measured_mean_us, mean_us
        Means over the steps, which steps that stall make longer than the medians.
    strategy, computation_us, memory_bytes, infeasible, remedies
        Of a described parallel job: its whole strategy, parts of the computation, memory by purpose, why it does not fit, and
        changes with which it would.
    synchronisation, target_loss, time_to_loss_s, training_steps, commits, sent_bytes, waiting_share, convergence
        Of a job of workers of unequal speed: its scheme, and what a training to the target loss takes.
    notes
        Sentences that the kind of job adds.
    tokens_per_second, ..., not_known
        See `kinds._work.Efficiency`.
    recording_doubt
        Why predictions from the recording are not to be trusted; None: they are.
    cluster
        The cluster that was asked for and the assumptions about it; `assumed` has the assumptions where none was.
    quantiles_us
        Quantiles over replays with resampled durations.
    """

    measured_us: float | None = msgspec.field(name="measured_iteration_us")
    iteration_us: float = msgspec.field(name="predicted_iteration_us")
    error_pct: float | None
    interval_us: tuple[float, float]
    breakdown_us: Mapping[str, float]
    peak_memory_bytes: int | None
    ops: int
    replay_seconds: float
    settled: bool
    unplaced: Mapping[str, str]
    calibration: IntervalSource | None

    baseline_iteration_us: float | UnsetType = UNSET
    baseline_error_pct: float | UnsetType = UNSET
    steps: tuple[ReplayedStep, ...] = ()
    measured_mean_us: float | UnsetType | None = UNSET
    mean_us: float | UnsetType | None = msgspec.field(name="predicted_mean_us", default=UNSET)

    strategy: Mapping[str, object] | UnsetType = UNSET
    computation_us: Mapping[str, float] | UnsetType = UNSET
    memory_bytes: Mapping[str, float] | UnsetType = UNSET
    infeasible: str | UnsetType | None = UNSET
    remedies: tuple[Remedy, ...] | UnsetType = UNSET
    synchronisation: str | UnsetType = UNSET
    target_loss: float | UnsetType = UNSET
    time_to_loss_s: float | UnsetType | None = UNSET
    training_steps: int | UnsetType = UNSET
    commits: int | UnsetType = UNSET
    sent_bytes: int | UnsetType = msgspec.field(name="bytes", default=UNSET)
    waiting_share: float | UnsetType = UNSET
    convergence: ConvergenceFacts | UnsetType = UNSET
    notes: tuple[str, ...] = ()

    tokens_per_second: float | UnsetType | None = UNSET
    tokens_per_second_per_device: float | UnsetType | None = UNSET
    mfu_pct: float | UnsetType | None = UNSET
    cost_per_million_tokens: float | UnsetType | None = UNSET
    cost_per_iteration_usd: float | UnsetType | None = UNSET
    energy_per_iteration_j: float | UnsetType | None = UNSET
    flops_per_device: float | UnsetType | None = UNSET
    price_assumed: str | UnsetType | None = UNSET
    power_assumed: str | UnsetType | None = UNSET
    mfu_doubt: str | UnsetType | None = UNSET
    not_known: Mapping[str, str] | UnsetType = UNSET

    recording_doubt: str | UnsetType | None = UNSET
    cluster: OtherCluster | None = None
    assumed: tuple[str, ...] = ()
    quantiles_us: Quantiles | None = None


def replay(recorded: JobInScenario, request: ReplayRequest) -> Replay:
    """Predict the iteration of a job, and write the files that the request names. What the job has replayed is not replayed again.

    Raises
    ------
    InputError
        The job does not have what is asked for.
    GraphError
        The trace cannot be replayed.
    """
    given, changes = split_options(request.changes)
    request = replace(request, changes=changes)
    if request.compares and request.changed:
        raise InputError(
            "--holdout-step and --own-durations compare with the recording: leave out --plan, --cluster, --set and --what-if"
        )
    if request.holdout_step is not None and request.own_durations:
        raise InputError("--holdout-step and --own-durations ask different questions: give one of them")
    scenario = scenario_of(recorded.job, request)
    here, plan = recorded.under(scenario)
    if request.compares:
        answer = _compared(here, recorded.job.compared(request.holdout_step))
    else:
        answer = predicted(here, plan, changed=request.changed)
    as_recorded = not (request.changed or request.compares)
    doubt = recorded.doubt_of(answer.iteration_us) if as_recorded else recorded.recording_doubt
    efficiency = efficiency_of(recorded, scenario, given, answer.iteration_us)
    interval_us = answer.interval_us
    if efficiency is not None and efficiency.mfu_pct is not None and efficiency.mfu_doubt is None and not scenario.scales:
        # The FLOPs at the peak of the device take at least so long.
        interval_us = (max(interval_us[0], answer.iteration_us * efficiency.mfu_pct / 100), interval_us[1])
    assumed = here.assumptions
    machines = scenario.cluster.machines
    samples = request.samples
    answer = msgspec.structs.replace(
        answer,
        interval_us=interval_us,
        recording_doubt=doubt,
        cluster=None if machines is None else OtherCluster(name=machines.describe(), left_out=assumed),
        assumed=assumed if machines is None else (),
        quantiles_us=None if samples is None else Quantiles.of(here.sampled(plan, samples=samples, on_sample=request.on_sample)),
        **fields_of(efficiency),
    )
    if request.perfetto is not None:
        write_file(request.perfetto, here.job.perfetto(here.lowered(plan), recorded=not request.changed))
    if request.timeline is not None:
        write_csv(here.timeline(plan), request.timeline)
    return answer


def scenario_of(job: Job, request: ReplayRequest) -> Scenario:
    """The scenario of a request; raises `InputError` if the job does not have what it changes."""
    return job.scenario(request.changes, Scenario(plan=request.plan).on(request.cluster))


def predicted(here: JobInScenario, plan: Plan, *, changed: bool) -> Replay:
    """The prediction of a plan without its efficiency; beside the measured iteration, where nothing was `changed`."""
    here.predict(plan)  # compiles the simulator the first time
    started = time.perf_counter()
    prediction = here.replayed(plan)
    seconds = time.perf_counter() - started
    measurement = MeasuredIterations() if changed else here.measurement
    measured_us = measurement.median_us
    answer = _answer(
        here,
        prediction,
        here.job.plan_facts(here, plan),
        measured_us=measured_us,
        error_pct=None if measured_us is None else (prediction.iteration_us / measured_us - 1) * 100,
        ops=here.lowered(plan).replayable.op_count,
        seconds=seconds,
    )
    return msgspec.structs.replace(answer, measured_mean_us=measurement.mean_us, mean_us=prediction.mean_us)


def _compared(here: JobInScenario, comparison: Comparison) -> Replay:
    answer = _answer(
        here,
        comparison.prediction,
        PlanFacts(),
        measured_us=comparison.measured_us,
        error_pct=comparison.error_pct,
        ops=comparison.ops,
        seconds=comparison.seconds,
    )
    return msgspec.structs.replace(
        answer,
        steps=comparison.steps,
        baseline_iteration_us=UNSET if comparison.baseline_us is None else comparison.baseline_us,
        baseline_error_pct=UNSET if comparison.baseline_error_pct is None else comparison.baseline_error_pct,
    )


def _answer(
    here: JobInScenario,
    prediction: Prediction,
    plan_facts: PlanFacts,
    *,
    measured_us: float | None,
    error_pct: float | None,
    ops: int,
    seconds: float,
) -> Replay:
    return Replay(
        measured_us=measured_us,
        iteration_us=prediction.iteration_us,
        error_pct=error_pct,
        interval_us=prediction.interval_us,
        breakdown_us=prediction.breakdown_us,
        peak_memory_bytes=prediction.peak_memory_bytes,
        ops=ops,
        replay_seconds=seconds,
        settled=prediction.settled,
        unplaced=dict(here.lowered(Plan()).unplaced),
        calibration=None if here.calibration is None else here.calibration.source,
        **fields_of(plan_facts),
    )
