"""Figure: what each strategy of the optimizer gains, as the search predicts it for the recordings at the base rate.

    python -m experiments.dpro.gains RESULTS --recordings DIR... [--real-runs DIR] [--trials 150]

One search for each strategy and recording, over the plans that have only its transformations; seed 0, sampler "auto" (op fusion,
which has no outer knobs: "critical-path"). Real runs are not made here: `--real-runs` names the cases of
`experiments.search.testbed`, which records, searches and runs the best plan beside the default (its `table` compares). What it has
no case for is said to be not measured.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.collect.trace import CommSettings, TensorInfo, Trace
from dpro_search.errors import InputError
from dpro_search.kinds import PlanOptions, job_of
from dpro_search.kinds._job import JobObjective
from dpro_search.replay.exchanges import Exchange
from dpro_search.search import run_search
from dpro_search.search.request import digest_of
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace
from experiments.dpro.figures import Panel, bars
from experiments.dpro.parts import Options, Section, gathered, script, table
from experiments.dpro.published import GAINS_PCT, SOURCE
from experiments.dpro.recordings import SYSTEMS, Recording
from experiments.search.testbed_case import PLAN
from experiments.search.testbed_report import CaseResult

NAME, TITLE = "gains", "What each strategy gains"
FIELDS = {  # of plans, by strategy
    "op fusion": ("op_clusters",),
    "tensor fusion": ("fusion_threshold_bytes", "tensor_groups", "bucket_cap_bytes"),
    "partition": ("bigarray_bound", "p3", "slice_threshold", "partition_bytes", "credit"),
}
ALL = "all"
_KEPT = ("servers",)  # of all strategies: more servers are more machines
STRATEGIES = (*FIELDS, ALL)


class Row(msgspec.Struct, kw_only=True):
    """The best plan of a search, None where the job has no such plans."""

    system: str
    workload: str
    link: str
    strategy: str
    baseline_us: float | None = None
    best_us: float | None = None
    certain: bool = False  # the intervals of both do not overlap
    plan: str = ""
    trials: int = 0
    seconds: float = 0.0

    @property
    def gain_pct(self) -> float | None:
        """How much faster the plan is predicted to be, in the paper's sense: 100 % is twice as fast."""
        return None if self.baseline_us is None or self.best_us is None else (self.baseline_us / self.best_us - 1) * 100


class Restricted:
    """An objective with only some of its plans.

    Parameters
    ----------
    prices
        What it is made of; its own space becomes the restricted one.
    fields
        Plan fields that stay; a transformation stays with all its fields or not at all.
    """

    def __init__(self, prices: JobObjective[Any], fields: Collection[str]) -> None:
        whole = prices.space
        kept = [transformation for transformation in whole.transformations if set(transformation.fields) <= set(fields)]
        self.space = PlanSpace(whole.job, kept)
        self.space.defaults = tuple(plan for plan in whole.defaults if self.space.refusal(plan) is None)
        self.prices = prices
        prices.space = self.space

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Those of the job."""
        return self.prices.tensors

    @property
    def recorded(self) -> CommSettings:
        """The recorded knobs."""
        found: CommSettings = self.prices.recorded
        return found

    def predict(self, plan: Plan) -> Prediction:
        """The price of a plan."""
        return self.prices.predict(plan)


class RestrictedHorovod(Restricted):
    """The same of a Horovod job, which also guides samplers."""

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        """Collectives of a plan with exact groups; none of others."""
        if plan.tensor_groups is None:
            return ()
        found: tuple[Exchange, ...] = self.prices.exchanges(plan)  # type: ignore[attr-defined]
        return found


def gains(options: Options) -> Section:
    """The section."""
    jobs = {}
    for recording in options.at_base():
        for strategy in STRATEGIES:
            jobs[f"{recording.name}/{strategy}"] = lambda one=(recording, strategy): row_of(*one, options)
    rows = list(gathered(options.results / f"{NAME}.json", Row, jobs).values())
    if not rows:
        return Section(name=NAME, title=TITLE, text="Not measured: no recording at the base rate was named.\n")
    text = "\n".join([_table(rows), _real_runs(options.real_runs), _theirs()])
    return Section(name=NAME, title=TITLE, text=text, picture=_picture(rows))


def row_of(recording: Recording, strategy: str, options: Options) -> Row:
    """Search one strategy's plans for one recording."""
    row = Row(system=recording.system, workload=recording.workload, link=recording.link, strategy=strategy)
    objective = restricted(recording.load(), strategy)
    if not objective.space.transformations:
        return row
    found = run_search(
        objective,
        trials=options.trials,
        out=options.results / "searches" / f"{recording.name}/{strategy}".replace(" ", "-").replace("/", "."),
        trace=str(recording.folder),
        trace_digest=digest_of(recording.folder),
        sampler="auto" if objective.space.choices else "critical-path",
        options={"strategy": strategy},
    )
    best = found.plans[0]
    row.baseline_us, row.best_us = found.baseline.iteration_us, best.prediction.iteration_us
    row.certain, row.plan, row.trials, row.seconds = best.gain_certain, describe(best.plan), found.trials, found.seconds
    return row


def restricted(trace: Trace, strategy: str) -> Restricted:
    """A trace's job with only the plans of a strategy."""
    of_tensorflow = trace.meta.settings is not None and trace.meta.framework == "tensorflow"
    fuses_ops = of_tensorflow and strategy in ("op fusion", ALL)
    prices = job_of(trace, PlanOptions(compute=frozenset({"op-fusion"}) if fuses_ops else frozenset())).objective()
    fields = FIELDS.get(strategy, tuple(name for name in prices.space.fields if name not in _KEPT))
    kind = RestrictedHorovod if trace.meta.settings is not None else Restricted
    return kind(prices, fields)


def _table(rows: Sequence[Row]) -> str:
    lines = []
    by_recording: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        by_recording.setdefault((row.system, row.workload, row.link), {})[row.strategy] = row
    for (system, workload, link), strategies in by_recording.items():
        cells = []
        for name in STRATEGIES:
            found = strategies.get(name)
            cells.append("-" if found is None or found.gain_pct is None else _gain(found))
        lines.append([SYSTEMS[system], workload, link, *cells, strategies[ALL].plan if ALL in strategies else ""])
    columns = ("system", "workload", "link", *(f"{name}#" for name in STRATEGIES), "plan of the last")
    note = (
        "Gain over the recorded setting (the framework's default), as predicted. A question mark: the "
        "intervals of both predictions overlap. A dash: the job has no such plans.\n\n"
    )
    return note + table(columns, lines)


def _real_runs(folder: Path | None) -> str:
    """Best plans of whole searches that were run beside the default."""
    files = [] if folder is None else sorted(folder.glob("*/case.json"))
    found = [_decoded(path) for path in files]
    lines = []
    for case in found:
        plan = next((row for row in case.rows if row.name == PLAN), None)
        if plan is not None:
            predicted = "" if plan.predicted_gain_pct is None else f"{_faster_pct(plan.predicted_gain_pct):+.1f} %"
            low, high = (_faster_pct(pct) for pct in plan.gain_interval_pct)
            measured = f"{_faster_pct(plan.gain_pct):+.1f} % ({low:+.1f} to {high:+.1f})"
            lines.append([SYSTEMS[case.setup.scheme], case.setup.workload, case.setup.rate, plan.setting, predicted, measured])
    if not lines:
        return "Real runs: not measured here (no case of `experiments.search.testbed` was named with `--real-runs`).\n"
    columns = ("system", "workload", "link", "plan", "predicted#", "measured (95 %)#")
    return "Real runs of the best plan of a search of its own, beside the default (other strategies: not measured):\n\n" + table(
        columns, lines
    )


def _decoded(path: Path) -> CaseResult:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CaseResult)
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path}: not what 'experiments.search.testbed table' wrote ({error})") from error


def _faster_pct(saved_pct: float) -> float:
    """How much faster a job is that saves a part of its iteration."""
    return (1 / (1 - saved_pct / 100) - 1) * 100


def _gain(row: Row) -> str:
    assert row.gain_pct is not None
    return f"{row.gain_pct:+.1f} %" + ("" if row.certain or not row.plan or row.plan == "as recorded" else " ?")


def _theirs() -> str:
    best = ", ".join(f"{name} {pct:g} % {over}" for name, (pct, over) in GAINS_PCT.items())
    return f"Theirs, best cases ({SOURCE}): {best}; BERT on 128 GPUs over TCP 1874 to 538 ms.\n"


def _picture(rows: Sequence[Row]) -> str:
    panels = []
    for system, name in SYSTEMS.items():
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row.system == system:
                found.setdefault(f"{row.workload}, {row.link}", {})[row.strategy] = row.gain_pct
        groups = tuple((label, tuple(values.get(strategy) for strategy in STRATEGIES)) for label, values in found.items())
        if groups:
            panels.append(Panel(title=name, groups=groups))
    return bars("Predicted gain of each strategy", STRATEGIES, panels, unit="predicted gain in %", top=40.0)


if __name__ == "__main__":
    script(gains, __doc__)
