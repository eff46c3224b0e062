"""`PageFacts`: all that a report shows, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from dpro_search.analysis.predict import Replay
from dpro_search.analysis.search import SearchAnswer
from dpro_search.deploy.measured_plans import ReportedStep
from dpro_search.deploy.validate import Validation
from dpro_search.kinds import Diagnosis, ParallelSetting, Term
from dpro_search.report.quality import HeldOutStep
from dpro_search.report.timeline import StepTimeline
from dpro_search.search.run_folder import ClusterFacts
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.tensor_groups import TensorGroups

if TYPE_CHECKING:
    from dpro_search.report.planner import Planner

Json = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PageFacts:
    """The contents of a report. A part that does not exist is None or empty, and its section states that or is left out.

    Attributes
    ----------
    name
        Of the run folder or of the trace.
    replay
        The answer of the verb `replay`.
    diagnosis
        The answer of the verb `diagnose`.
    efficiency
        Titles and values of tokens a second, MFU, price and energy, and why others are not known.
    described
        Whether the job was described, so that nothing was measured of it.
    settings
        The described setting of a parallel job, and the best plan where one was found; empty for other kinds of jobs.
    search
        The answer of the verb `run`; None: a report of a trace.
    baseline
        The prediction of the setting without a plan in that search.
    cluster
        Where all predictions hold, if not on the recorded cluster.
    trials
        Of a search, in order: ``number``, ``origin``, ``iteration_us``, ``peak_memory_bytes``, ``infeasible``, ``name``.
    validation
        Real runs of the plans; None: not validated.
    reported
        What people measured of the plans elsewhere, by the name of the plan.
    sample_runs
        The same of real runs that came with a bundled recording, where none of them is of a plan that was searched.
    corrected_pct
        Mean error of the predictions of what was validated: as they were, and corrected by the other measurements; None: not known.
    timeline
        One step, predicted and measured.
    planner
        All priced plans of a parallel job; None: it was not searched, or is another kind of job.
    groups
        Which tensors travel together, by setting; None: not known.
    held_out
        Recorded steps, each predicted from the others.
    terms
        Of the cost model.
    provenance
        Titles and values, for a table.
    notes
        What the report could not show, and why.
    """

    name: str
    replay: Replay
    diagnosis: Diagnosis
    timeline: StepTimeline
    described: bool = False
    efficiency: tuple[Sequence[tuple[str, str]], Sequence[str]] = ((), ())
    settings: Sequence[ParallelSetting] = ()
    search: SearchAnswer | None = None
    baseline: Prediction | None = None
    cluster: ClusterFacts | None = None
    trials: Sequence[Json] = ()
    validation: Validation | None = None
    reported: Sequence[tuple[str, ReportedStep]] = ()
    sample_runs: Validation | None = None
    corrected_pct: tuple[float, float] | None = None
    planner: Planner | None = None
    groups: TensorGroups | None = None
    held_out: Sequence[HeldOutStep] = ()
    terms: Sequence[Term] = ()
    provenance: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()

    @property
    def origin(self) -> str:
        """The source of the setting without a plan, in a word."""
        return "described" if self.described else "recorded"

    @property
    def unchanged(self) -> str:
        """The name of the setting without a plan; a described job that leaves its setting open has a usual one."""
        compared = UNSET if self.search is None else self.search.baseline
        return f"as {self.origin}" if compared is UNSET or compared.usual_plan is None else "usual plan"

    def name_of_plan(self, plan: Plan) -> str:
        """The name of a plan for people, with its number where the search lists it."""
        settings = msgspec.to_builtins(plan.settings)
        rows = () if self.search is None else self.search.plans
        return next((row.title for row in rows if row.plan == settings), describe(plan))

    @property
    def own_cluster(self) -> str:
        """The name of the cluster that the job was recorded on or described for, as a search calls it."""
        return f"the {self.origin} cluster"
