"""Which plan of a run an export takes, and what it says of it."""

from pathlib import Path

import msgspec
import pytest

from dpro_search.deploy.losses import Equivalence
from dpro_search.deploy.of_run import export_from
from dpro_search.deploy.validate import FailedPlan, MeasuredPlan, RefusedPlan, Validation
from dpro_search.errors import InputError
from dpro_search.kinds import all_targets, deployed
from dpro_search.search import RankedPlan, SearchResult
from dpro_search.space.plan import Plan, Prediction

GROUPED, CYCLE, THRESHOLD = (
    Plan(tensor_groups=(("a#0", "b#1"),)),
    Plan.of(cycle_time_us=2000.0),
    Plan.of(fusion_threshold_bytes=2**20),
)
US = {GROUPED: 8e4, CYCLE: 9e4, THRESHOLD: 9.5e4, Plan(): 1e5}


def prediction(us: float) -> Prediction:
    return Prediction(iteration_us=us, interval_us=(us, us), breakdown_us={}, peak_memory_bytes=None, source="recorded")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A search that found the plans in the order of `US`; its trace is gone."""
    folder = tmp_path / "run"
    ranked = (
        RankedPlan(plan=plan, prediction=prediction(us), trial=n, speedup=1e5 / us, gain_certain=True)
        for n, (plan, us) in enumerate(US.items())
    )
    result = SearchResult(
        run=str(folder), trials=4, seconds=1.0, stopped="finished", baseline=prediction(1e5), plans=tuple(ranked)
    )  # fmt: skip
    result.save()
    return folder


def measured(plan: Plan, speedup: float, *, beyond_noise: bool = True) -> MeasuredPlan:
    return MeasuredPlan(
        plan=plan,
        predicted_us=US[plan],
        interval_us=(US[plan], US[plan]),
        measured_us=1e5 / speedup,
        spread_us=0,
        error_pct=0,
        speedup_predicted=1e5 / US[plan],
        speedup_measured=speedup,
        speedup_interval=(speedup - 0.02, speedup + 0.02),
        beyond_noise=beyond_noise,
    )


def validated(run: Path, **found: object) -> Path:
    base = Validation(baseline_us=1e5, baseline_predicted_us=1e5, baseline_error_pct=0, noise_pct=1, rounds=2, plans=())
    (run / "validation.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(base, **found)))
    return run


def exported(run: Path, **options: object) -> tuple[Plan, str]:
    """The plan, and what people are told."""
    export = export_from(run, run.parent / "out", all_targets(), deployed, **options)
    return Plan.load(export.folder / "plan.json"), export.usage


def test_the_plan_that_was_proved_is_taken_and_named(run):
    plan, usage = exported(validated(run, plans=(measured(GROUPED, 0.97), measured(CYCLE, 1.07), measured(THRESHOLD, 1.12))))
    assert plan == THRESHOLD
    assert "This is plan 3 (fusion 1.0 MiB): measured: 1.12x the recorded speed (95 %: 1.10 to 1.14)." in usage


def test_a_gain_within_the_noise_is_no_proof(run):
    plan, usage = exported(validated(run, plans=(measured(GROUPED, 1.01, beyond_noise=False),)))
    assert plan == GROUPED
    assert "no difference beyond the noise" in usage


@pytest.mark.parametrize(
    "refuted",
    [
        {"plans": (measured(GROUPED, 0.9),)},
        {"failed": (FailedPlan(plan=GROUPED, predicted_us=8e4, reason="no \x1b[2Jmemory", runs=0, measured_us=None),)},
        {
            "refused": (
                RefusedPlan(
                    plan=GROUPED,
                    predicted_us=8e4,
                    measured_us=8e4,
                    losses=Equivalence(verdict="different", compared=3, difference=1.0, tolerance=0.1, reason="they differ"),
                ),
            )
        },
    ],
)
def test_a_refuted_plan_is_not_taken_unless_it_is_named(refuted, run):
    assert exported(validated(run, **refuted))[0] == CYCLE
    plan, usage = exported_by_number(run, 1)
    assert plan == GROUPED
    assert "\x1b" not in usage, "a terminal's escape from a file"
    assert "This is plan 1" in usage


def exported_by_number(run: Path, number: int) -> tuple[Plan, str]:
    export = export_from(run, run.parent / "named", all_targets(), deployed, number=number)
    return Plan.load(export.folder / "plan.json"), export.usage


def test_a_plan_that_needs_no_change_of_the_script_is_offered(run):
    plan, usage = exported(run)
    assert plan == GROUPED
    assert "not measured yet" in usage
    assert "Plan 2 (cycle 2.0 ms) needs no change of the script: `--environment-only` exports it." in usage


def test_it_can_be_asked_for(run):
    plan, usage = exported(run, environment_only=True)
    assert plan == CYCLE
    assert "--environment-only" not in usage


def test_a_slower_plan_is_no_answer(run):
    slower = validated(run, plans=(measured(CYCLE, 0.9), measured(THRESHOLD, 0.9)))
    with pytest.raises(InputError, match="every plan that is faster needs a change of the script"):
        exported(slower, environment_only=True)


@pytest.mark.parametrize(
    ("name", "where"),
    [("result.json", b"iteration_us"), ("validation.json", b"noise_pct"), ("plans/plan-1.json", b"tensor_groups")],
)
def test_one_damaged_byte_is_said(name, where, run):
    path = validated(run) / name
    content = bytearray(path.read_bytes())
    content[content.index(where)] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=name):
        exported(run)


def test_a_plan_without_its_prediction_is_said(run):
    path = run / "result.json"
    path.write_text(path.read_text().replace("2000.0", "2000.5"))
    assert "result.json has no prediction of plan-2.json" in exported(run, environment_only=True)[1]


def test_a_recording_that_is_gone_is_said(run):
    (run / "run.json").write_text(
        '{"version":1,"sampler":"mcmc","seed":0,"trace":"/gone","trace_digest":"","recorded":null,"created":""}'
    )  # fmt: skip
    assert "not checked against its recording (/gone" in exported(run)[1]


def test_a_trace_is_not_a_run(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(InputError, match="a trace, not the folder of a search; search with 'dpro-search run"):
        exported(tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(InputError, match="an empty folder, not the folder of a search"):
        exported(tmp_path)
