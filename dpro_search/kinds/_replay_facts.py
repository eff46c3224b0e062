"""``replay_facts(source, request)``: what the verb `replay`, the Python API and the report say of any kind of job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpro_search.collect._files import write_file
from dpro_search.errors import InputError
from dpro_search.kinds import Comparison, Job, PlanOptions, Source, job_of
from dpro_search.kinds._efficiency import efficiency_facts, split_options
from dpro_search.kinds._facts import quantiles_us
from dpro_search.replay.outputs import write_csv
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """What is to be replayed, and what is to be written."""

    plan: Plan = field(default_factory=Plan)  # Changes of strategy, before `changes`.
    cluster: str | None = None  # What the job runs on, like ``16xhgx-h100`` or a TOML file; None: as recorded.
    changes: tuple[str, ...] = ()  # Changes as text, like ``cycle_time_us=5ms`` or ``compute=0.9`` (see `space.scenario`).
    # holdout_step, own_durations: Compare a profiled step with its prediction from the others; compare each with the replay of its
    # own durations.
    holdout_step: int | None = None
    own_durations: bool = False
    samples: int | None = None  # Replay so many times with durations drawn anew.
    # perfetto, timeline: Files for ui.perfetto.dev and, as CSV, for tables.
    perfetto: Path | None = None
    timeline: Path | None = None
    options: PlanOptions = field(default_factory=PlanOptions)  # Models that predictions depend on.
    on_sample: Callable[[], None] = lambda: None  # Called after each sample.

    @property
    def compares(self) -> bool:
        """Whether profiled steps are compared with their own replay."""
        return self.holdout_step is not None or self.own_durations

    @property
    def changed(self) -> bool:
        """Whether anything but the recorded setting is asked for."""
        return self.plan != Plan() or self.cluster is not None or bool(self.changes)


def replay_facts(source: Source, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints as JSON.

    Raises
    ------
    InputError
        The job does not have what is asked for.
    GraphError
        The trace cannot be replayed.
    """
    return facts_of_job(job_of(source), request)


def facts_of_job(job: Job, request: ReplayRequest) -> dict[str, Any]:
    """As `replay_facts`, of a job that exists: what it has replayed is not replayed again."""
    given, changes = split_options(request.changes)
    request = replace(request, changes=changes)
    if request.compares and request.changed:
        raise InputError(
            "--holdout-step and --own-durations compare with the recording: leave out --plan, --cluster, --set and --what-if"
        )
    if request.holdout_step is not None and request.own_durations:
        raise InputError("--holdout-step and --own-durations ask different questions: give one of them")
    recorded = job
    scenario = scenario_of(recorded, request)
    job, plan = recorded.under(scenario)
    known_error = job.replay_error
    job = job.allowing(plan, request.options)
    job._replay_error = known_error
    if request.compares:
        found = job.own_durations() if request.holdout_step is None else job.held_out(request.holdout_step)
        facts = _compared(job, found)
    else:
        facts = predicted_facts(job, plan, request.changed)
    facts |= efficiency_facts(recorded, scenario, given, facts["predicted_iteration_us"])
    if facts.get("mfu_pct") is not None and facts["mfu_doubt"] is None and not scenario.scales:
        low_us, high_us = facts["interval_us"]  # FLOPs at the peak of the device take at least so long
        facts["interval_us"] = (max(low_us, facts["predicted_iteration_us"] * facts["mfu_pct"] / 100), high_us)
    if request.changed or request.compares:
        facts["recording_doubt"] = recorded.recording_doubt
    else:
        facts["recording_doubt"] = job.doubt_of(facts["predicted_iteration_us"], facts["measured_iteration_us"])
    assumed = list(job.left_out(scenario.cluster))
    if scenario.cluster.machines is not None:
        facts["cluster"] = {"name": scenario.cluster.machines.describe(), "left_out": assumed}
    elif assumed:
        facts["assumed"] = assumed
    if request.samples is not None:
        facts["quantiles_us"] = quantiles_us(job.sampled(plan, samples=request.samples, on_sample=request.on_sample))
    if request.perfetto is not None:
        write_file(request.perfetto, job.perfetto(plan, recorded=not request.changed))
    if request.timeline is not None:
        write_csv(job.timeline(plan), request.timeline)
    return facts


def scenario_of(job: Job, request: ReplayRequest) -> Scenario:
    """What a request changes about a job; raises `InputError` for what it does not have."""
    known = (*job.askable, *job.settings)
    return Scenario(plan=request.plan).on(request.cluster).changed(request.changes, known=known, job=job.title)


def predicted_facts(job: Job, plan: Plan, changed: bool) -> dict[str, Any]:
    """The facts of a prediction; beside the measured iteration, where nothing was `changed`."""
    job.predict(plan)  # compiles the simulator the first time
    started = time.perf_counter()
    prediction = job.replayed(plan)
    seconds = time.perf_counter() - started
    measured = None if changed else job.measured_iteration_us
    error = None if measured is None else (prediction.iteration_us / measured - 1) * 100
    facts = _facts(job, prediction, measured, error, job.op_count(plan), seconds)
    facts |= {"measured_mean_us": None if changed else job.measured_mean_us, "predicted_mean_us": prediction.mean_us}
    return facts | job.more_facts(plan)


def _compared(job: Job, found: Comparison) -> dict[str, Any]:
    return _facts(job, found.prediction, found.measured_us, found.error_pct, found.ops, found.seconds) | dict(found.more)


def _facts(
    job: Job, prediction: Prediction, measured: float | None, error: float | None, ops: int, seconds: float
) -> dict[str, Any]:
    return {
        "measured_iteration_us": measured,
        "predicted_iteration_us": prediction.iteration_us,
        "error_pct": error,
        "interval_us": prediction.interval_us,
        "breakdown_us": prediction.breakdown_us,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "ops": ops,
        "replay_seconds": seconds,
        "settled": prediction.settled,
        "unplaced": dict(job.unplaced),
        "calibration": None if job.calibration is None else job.calibration.facts,
    }
