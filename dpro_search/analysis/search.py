"""``search_answer(job, result)``: the best plans of a search, with what they need and what the kind of job says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from dpro_search.deploy.parts.part import Servers
from dpro_search.deploy.targets import Change, change_of, more_servers
from dpro_search.kinds import JobInScenario, Source, kind_of, targets_of
from dpro_search.kinds._answers import ComparedSetting, PlanMemory, fields_of
from dpro_search.machine import IntervalSource
from dpro_search.search.objective import StrategyFacts
from dpro_search.search.result import RankedPlan, SearchResult
from dpro_search.search.run_folder import ClusterFacts
from dpro_search.space.plan import Plan


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of real runs of a search's plans."""

    servers: Servers | None = None  # Parameter servers of the recorded job.
    # What changes in the job for each listed plan; None: it cannot follow the plan. Empty: not known.
    changes: Sequence[Change | None] = ()

    @staticmethod
    def of(source: Source, result: SearchResult) -> Deployment:
        """The inputs of real runs of plans for a trace or a description."""
        kind, targets = kind_of(source), targets_of(source)
        if not targets:
            return Deployment(servers=kind.servers(source))
        facts = kind.facts(source)
        return Deployment(servers=kind.servers(source), changes=[change_of(ranked.plan, targets, facts) for ranked in result.plans])


class PlanRow(StrategyFacts, frozen=True, kw_only=True, omit_defaults=True):
    """A plan of a search; times in us.

    Attributes
    ----------
    number, name, lossy
        Of a listed plan: its place, the best being 1; the plan in a few words; whether it changes the numbers that are trained.
    plan
        Its settings by name.
    speedup
        Iteration time of the setting without a plan over that of the plan.
    gain_certain
        Whether the whole interval lies below that of the setting without a plan.
    infeasible
        Why the plan does not fit; None: it fits.
    quantile_us, beats_recorded
        See `search.result.RankedPlan`.
    more_servers
        Server hosts that the plan needs beyond those that were recorded.
    change
        What has to change in the job: its environment or its script; None: it cannot follow the plan, or this is not known.
    """

    number: int | UnsetType = UNSET
    name: str | UnsetType = UNSET
    lossy: bool | UnsetType = UNSET
    plan: Mapping[str, object]
    predicted_iteration_us: float
    interval_us: tuple[float, float]
    peak_memory_bytes: int | None
    speedup: float
    gain_certain: bool
    infeasible: str | None
    quantile_us: float | UnsetType | None = UNSET
    beats_recorded: float | UnsetType | None = UNSET
    more_servers: int | UnsetType = UNSET
    change: Change | UnsetType | None = UNSET

    @property
    def title(self) -> str:
        """Number and name of a listed plan."""
        return f"plan {self.number}: {self.name}"


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of the verb `run`; times in us. See `search.result.SearchResult` for what is not described here.

    Attributes
    ----------
    run
        The run folder.
    baseline_us, baseline_interval_us
        Prediction of the setting without a plan.
    worth_measuring
        Whether no gain is certain, but that of the best plan is large enough to measure it.
    feasible
        Whether any plan keeps the limits.
    pareto
        The front of time and memory, fastest first.
    calibration
        What the intervals are based on; None: the spread of recorded steps alone.
    recording_doubt
        Why predictions from the recording are not to be trusted; None: they are.
    reasons
        Why the first plan is the best, and what the others lose, in sentences.
    baseline, memory
        Of a parallel job: the setting without a plan, and the memory that plans may take.
    cluster
        Where the predictions hold, if not where the job was recorded.
    """

    run: str
    trials: int
    seconds: float
    stopped: str
    baseline_us: float
    baseline_interval_us: tuple[float, float]
    best_us: float
    speedup: float
    gain_certain: bool
    worth_measuring: bool
    feasible: bool
    workers_lost: int
    plans: tuple[PlanRow, ...]
    pareto: tuple[PlanRow, ...]
    beats: tuple[tuple[float, ...], ...]
    calibration: IntervalSource | None
    recording_doubt: str | None
    reasons: tuple[str, ...]
    baseline: ComparedSetting | UnsetType = UNSET
    memory: PlanMemory | UnsetType = UNSET
    cluster: ClusterFacts | UnsetType = UNSET


def search_answer(
    here: JobInScenario,
    result: SearchResult,
    deployment: Deployment,
    *,
    cluster: ClusterFacts | None = None,
    doubt: str | None = None,
) -> SearchAnswer:
    """The answer about a finished search; `here` is what was searched, `doubt` the recording's."""
    calibration, objective = here.calibration, here.objective()
    return SearchAnswer(
        run=result.run,
        trials=result.trials,
        seconds=result.seconds,
        stopped=result.stopped,
        baseline_us=result.baseline.iteration_us,
        baseline_interval_us=result.baseline.interval_us,
        best_us=result.plans[0].prediction.iteration_us,
        speedup=result.plans[0].speedup,
        gain_certain=result.gain_certain,
        worth_measuring=result.worth_measuring,
        feasible=result.feasible,
        workers_lost=result.workers_lost,
        plans=tuple(
            msgspec.structs.replace(
                _row(ranked),
                number=number,
                name=name,
                lossy=ranked.plan.is_lossy,
                more_servers=0 if deployment.servers is None else more_servers(ranked.plan, deployment.servers),
                change=deployment.changes[number - 1] if deployment.changes else None,
            )
            for number, (name, ranked) in enumerate(zip(result.names, result.plans, strict=True), 1)
        ),
        pareto=tuple(_row(ranked) for ranked in result.front),
        beats=result.beats,
        calibration=None if calibration is None else calibration.source,
        recording_doubt=doubt,
        reasons=objective.reasons([ranked.plan for ranked in result.plans]),
        cluster=UNSET if cluster is None else cluster,
        **fields_of(objective.facts()),
    )


def servers_note(plans: Sequence[Plan], servers: Servers) -> str:
    """A sentence on the plans that need more server hosts than were recorded; empty: none."""
    more_of_plan = {number: more for number, plan in enumerate(plans, 1) if (more := more_servers(plan, servers))}
    if not more_of_plan:
        return ""
    needs = ", ".join(f"plan {number} ({more} more)" for number, more in more_of_plan.items())
    if servers.on_workers:
        return f"Plans that need further hosts for servers: {needs}, with links like the workers'; the recorded ones shared hosts."
    return f"Plans with more than the {servers.count} recorded servers: {needs}. Each server needs a host with a link like theirs."


def _row(ranked: RankedPlan) -> PlanRow:
    prediction = ranked.prediction
    return PlanRow(
        plan=msgspec.to_builtins(ranked.plan.settings),
        predicted_iteration_us=prediction.iteration_us,
        interval_us=prediction.interval_us,
        peak_memory_bytes=prediction.peak_memory_bytes,
        speedup=ranked.speedup,
        gain_certain=ranked.gain_certain,
        infeasible=prediction.infeasible,
        quantile_us=UNSET if ranked.quantile_us is None else ranked.quantile_us,
        beats_recorded=UNSET if ranked.quantile_us is None else ranked.beats_recorded,
        **fields_of(ranked.facts),
    )
