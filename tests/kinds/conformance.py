"""What every kind of job must pass: a new kind subclasses `KindConformance` and gives a real recording.

class TestMyKind(KindConformance):
    kind = my_module.KIND

    @classmethod
    def recording(cls): ...
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from dpro_search.cli.doctor.trace_checks import check_trace
from dpro_search.collect.trace import Trace
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.targets import targets_for
from dpro_search.errors import DproSearchError, InputError
from dpro_search.kinds import COMPUTE, JobInScenario, Kind, PlanOptions, all_targets, job_of, kind_of, recorded_job
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.cli.facts import replayed

REPLAY_KEYS = {
    *("measured_iteration_us", "predicted_iteration_us", "error_pct", "interval_us", "breakdown_us", "peak_memory_bytes"),
    *("ops", "replay_seconds"),
}
DIAGNOSE_KEYS = {
    *("iteration_us", "measured_iteration_us", "critical_path", "critical_ops", "ranks", "gains", "findings", "warnings"),
}


class KindConformance:
    """Tests of one kind, on its `recording`."""

    kind: ClassVar[Kind]  # The constant ``KIND`` of its module.
    # What its plans may do beyond communication, as far as the recording has it.
    options: ClassVar[PlanOptions] = PlanOptions(allow_lossy=True)
    timeline_error: ClassVar[float] = (
        1e-6  # Relative difference of the timeline from the replay, which may have engines of their own.
    )
    unmoved: ClassVar[tuple[str, ...]] = ()  # Choices of its space, and speeds, that change no prediction of this recording.

    @classmethod
    def recording(cls) -> Trace:
        """A real recording of such a job."""
        raise NotImplementedError

    @pytest.fixture
    def trace(self) -> Trace:
        return _recorded(type(self))

    @pytest.fixture
    def job(self) -> JobInScenario:
        return _job(type(self))

    def test_its_traces_are_recognised(self, trace: Trace) -> None:
        assert kind_of(trace) is self.kind
        assert isinstance(self.kind.job(trace, PlanOptions()), self.kind.job_type)

    def test_the_empty_plan_is_the_recorded_setting(self, job: JobInScenario) -> None:
        prediction = job.predict(Plan())
        assert prediction.source == "recorded"
        low, high = prediction.interval_us
        assert 0 < low <= prediction.iteration_us <= high
        assert prediction == job.predict(Plan())

    def test_it_is_lowered_in_any_scenario_without_being_changed(self, job: JobInScenario) -> None:
        lower = job.job.lower
        recorded = lower(Scenario())
        assert recorded.as_recorded
        assert recorded.replayable.op_count > 0
        times, timeline = recorded.replayable.iterations(), recorded.replayable.timeline()
        assert times.iteration_us == pytest.approx(timeline.iteration_us, rel=self.timeline_error)
        assert recorded.replayable.iterations(detailed=True).breakdown_us
        for text in ("compute=0.5", "communication=0"):
            scenario = job.job.scenario([text])
            changed = lower(scenario)
            assert not changed.as_recorded
            changed_job, plan = job.under(scenario)
            assert changed.replayable.iterations().iteration_us == changed_job.predict(plan).iteration_us
        assert lower(Scenario()).replayable.iterations().iteration_us == times.iteration_us
        assert job.scenario == Scenario()

    def test_what_it_cannot_be_lowered_in_is_refused_in_one_line(self, job: JobInScenario) -> None:
        foreign = next(name for name in ("credit", "cycle_time_us") if name not in job.space.fields)
        unknown = {"global_batch": 64, "sequence": 128, "precision": "fp8", "measured_us": 1.0, "target_loss": 0.1}
        unknown = {name: value for name, value in unknown.items() if name.removesuffix("_us") not in job.job.settings}
        scenarios = [Scenario(plan=Plan.of(**{foreign: 1})), *(Scenario(**{name: value}) for name, value in unknown.items())]
        for scenario in scenarios:
            with pytest.raises(InputError) as refused:
                job.job.lower(scenario)
            assert "\n" not in str(refused.value)

    def test_a_plan_that_repeats_the_recording_is_the_empty_one(self, job: JobInScenario) -> None:
        repeated = {name: value for name, value in job.space.job.values.items() if value is not None}
        assert job.space.simplest(Plan.of(**repeated)) == Plan()

    def test_every_choice_changes_the_prediction(self, job: JobInScenario) -> None:
        recorded_us = job.predict(Plan()).iteration_us
        for choice in job.space.choices:
            plans = [choice.put(Plan(), grid, index) for grid, points in choice.grids.items() for index in {0, len(points) - 1}]
            moved = [plan for plan in plans if job.predict(plan).iteration_us != recorded_us]
            assert moved or choice.name in self.unmoved or len(choice.grids) == 1, choice.name

    def test_a_field_of_another_kind_is_refused_with_both_names(self, job: JobInScenario) -> None:
        foreign = next(name for name in ("credit", "cycle_time_us") if name not in job.space.fields)
        with pytest.raises(InputError, match=f"{job.title} has no {foreign}"):
            job.predict(Plan.of(**{foreign: 1}))

    def test_a_misspelt_knob_is_one_line_with_the_nearest_name(self, job: JobInScenario) -> None:
        known = (*job.job.askable, *job.job.settings)
        with pytest.raises(InputError) as refused:
            job.job.scenario([f"{known[0]}x=1"])
        assert f"did you mean {known[0]}?" in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_plans_are_described_in_words(self, job: JobInScenario) -> None:
        for choice in job.space.choices:
            for grid, points in choice.grids.items():
                plan = choice.put(Plan(), grid, len(points) - 1)
                assert "=" not in describe(plan)
                assert (describe(plan) == "as recorded") == (plan == Plan())

    def test_memory_is_known_or_a_limit_is_refused(self, trace: Trace, job: JobInScenario) -> None:
        if job.predict(Plan()).peak_memory_bytes is None:
            with pytest.raises(InputError, match="does not tell how much memory"):
                job_of(trace, replace(self.options, memory_limit_bytes=1))
        else:
            assert job_of(trace, replace(self.options, memory_limit_bytes=1)).predict(Plan()).infeasible is not None

    def test_plans_survive_their_file(self, job: JobInScenario) -> None:
        for plan in (Plan(), *job.space.starts(4)):
            assert Plan.from_json(plan.to_json()) == plan

    def test_what_can_be_searched_can_be_exported(self, job: JobInScenario, trace: Trace, tmp_path: Path) -> None:
        targets = self.kind.targets_of(trace.meta.framework)
        exported = {name for target in targets for name in target.fields}
        assert {*job.space.fields} <= exported
        for number, choice in enumerate(job.space.choices):
            grid = list(choice.grids)[-1]
            plan = choice.put(Plan(), grid, 0)
            folder = tmp_path / str(number)
            files = export_plan(plan, folder, targets_for(plan, targets), self.kind.facts(trace))
            assert {"README.md", "plan.json"} <= {*files.files}
            assert Plan.load(folder / "plan.json") == plan
        assert {*targets} <= {*all_targets()}

    def test_replay_has_the_facts_of_the_contract(self, trace: Trace, tmp_path: Path) -> None:
        facts = replayed(trace, perfetto=tmp_path / "p.json", timeline=tmp_path / "t.csv")
        assert facts.keys() >= REPLAY_KEYS
        msgspec.json.encode(facts)
        assert msgspec.json.decode((tmp_path / "p.json").read_bytes())["traceEvents"]
        assert len((tmp_path / "t.csv").read_text().splitlines()) > 2

    def test_other_speeds_change_what_they_should(self, job: JobInScenario) -> None:
        recorded_us = job.predict(Plan()).iteration_us
        for text in ("compute=0.5", "communication=0"):
            changed, plan = job.under(job.job.scenario([text]))
            prediction = changed.predict(plan)
            assert prediction.iteration_us < recorded_us or text in self.unmoved
            assert prediction.source == "extrapolated"

    def test_a_diagnosis_has_the_facts_of_the_contract_and_tables(self, job: JobInScenario) -> None:
        diagnosis = job.diagnose()
        assert msgspec.to_builtins(diagnosis).keys() >= DIAGNOSE_KEYS
        for table in diagnosis.tables:
            assert all(len(row) == len(table.columns) for row in table.rows)

    def test_what_a_diagnosis_asks_can_be_asked(self, job: JobInScenario) -> None:
        """A row of ``gains`` that is written as a change is understood by ``--set``, and gives the same prediction."""
        understood = 0
        for row in job.diagnose().gains:
            try:
                scenario = job.job.scenario([row.what_if])
            except InputError:
                continue  # words about the graph, not a change of a knob
            changed, plan = job.under(scenario)
            prediction = changed.predict(plan)
            assert prediction.iteration_us == pytest.approx(row.predicted_iteration_us, rel=0.02), row.what_if
            understood += 1
        assert understood or not (*job.job.askable, *job.job.settings)

    def test_steps_are_compared_or_the_kinds_that_can_are_named(self, job: JobInScenario, trace: Trace) -> None:
        step = max(trace.steps.index[trace.steps.traced].tolist()) - 1
        for ask in (lambda: job.job.compared(None), lambda: job.job.compared(step), lambda: job.sampled(Plan(), samples=2)):
            with contextlib.suppress(DproSearchError):
                ask()

    def test_it_can_be_started_again_or_says_what_can(self, trace: Trace) -> None:
        if trace.meta.format in {launcher.format for launcher in self.kind.launchers}:
            foreign = {"LD_PRELOAD": "harm.so", "PATH": "harm", "PYTHONWARNINGS": "harm", "BROWSER": "harm"}
            meta = msgspec.structs.replace(trace.meta, knobs={**trace.meta.knobs, **foreign})
            job = recorded_job(replace(trace, meta=meta), ("python", "train.py"))
            assert job.targets
            assert not foreign.keys() & job.spec.env.keys()
            recorded = {name: value for name, value in trace.meta.knobs.items() if name.isupper() and value}
            assert recorded.items() <= job.spec.env.items()
        elif self.kind.profile_launcher_name:
            assert recorded_job(trace, ("python", "train.py")).spec.ranks >= trace.meta.ranks
            with pytest.raises(InputError, match="write it after '--'"):
                recorded_job(trace)
        else:
            with pytest.raises(InputError, match="cannot be started here"):
                recorded_job(trace, ("python", "train.py"))

    def test_doctor_says_what_can_be_done_with_it(self, trace: Trace, tmp_path: Path) -> None:
        trace.save(tmp_path / "trace")
        checks: dict[str, Any] = {check.name: check for check in check_trace(tmp_path / "trace")}
        assert checks["replay, diagnose"].ok
        assert checks["run"].ok == bool(job_of(trace).space.fields)

    def test_compute_that_it_cannot_change_is_refused(self, trace: Trace) -> None:
        plain = job_of(trace).space.fields
        for name in COMPUTE:
            with contextlib.suppress(InputError):
                assert job_of(trace, PlanOptions(compute=frozenset({name}))).space.fields != plain


@functools.cache
def _recorded(suite: type[KindConformance]) -> Trace:
    return suite.recording()


@functools.cache
def _job(suite: type[KindConformance]) -> JobInScenario:
    return job_of(_recorded(suite), suite.options)
