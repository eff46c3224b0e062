"""Rounds of an interrupted validation: kept, used by the next call of the same, ignored by any other."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.deploy.kept_rounds import KeptRun, RoundsFile
from dpro_search.deploy.step_split import ComparedSplit, StepSplit
from dpro_search.deploy.validate import validate
from dpro_search.space.plan import Plan
from tests.deploy.fake_job import FAST, SLOW, FakeJob, prediction, validated

MEDIANS_US = {Plan(): 4e5, FAST: 3e5, SLOW: 5e5}
COMMAND = ("python", "train.py")


class Interrupted(FakeJob):
    """Is interrupted before a run."""

    def __init__(self, *args, before, **options):
        super().__init__(*args, **options)
        self.before = before

    def run(self, plan, **options):
        if len(self.ran) == self.before:
            raise KeyboardInterrupt
        return super().run(plan, **options)


def rounds_file(folder, *, command=COMMAND, plans=(FAST, SLOW), warmup=5):
    job = SimpleNamespace(spec=JobSpec(command=command, ranks=2), rate_bps=1e9, shaped=True, paced=None)
    return RoundsFile(folder, job, plans, warmup)


@pytest.fixture
def interrupted(tmp_path):
    """The folder of a validation that was interrupted in its second round, and the runs before."""
    job, kept = Interrupted(MEDIANS_US, before=6), rounds_file(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        validated(job, rounds=3, on_round=kept.add)
    return tmp_path


def test_a_finished_round_is_read_back_as_it_was_measured(interrupted):
    (one,) = rounds_file(interrupted).rounds
    whole = FakeJob(MEDIANS_US)
    expected = [whole.run(plan, warmup=5, timeout_s=None) for plan in (Plan(), FAST, SLOW, Plan())]
    by_number = {-1: [expected[0], expected[3]], 0: [expected[1]], 1: [expected[2]]}
    for kept in one.runs:
        run = by_number[kept.number].pop(0)
        assert kept.run().times.iteration_us.tolist() == run.times.iteration_us.tolist()
        assert kept.run().losses == run.losses


def test_a_kept_run_knows_where_the_time_of_its_steps_went():
    split = StepSplit(step_us=1.0, compute=0.5, bubble=0.3, exposed_communication=0.2, contention=0.1, by_axis={"pp": 0.2})
    run = replace(FakeJob(MEDIANS_US).run(FAST, warmup=5, timeout_s=None), split=ComparedSplit.of(split, split))
    kept = msgspec.json.decode(msgspec.json.encode(KeptRun.of(0, run)), type=KeptRun)
    assert kept.run().split == run.split


def test_the_next_validation_runs_only_the_rounds_that_are_left(interrupted):
    job = FakeJob(MEDIANS_US)
    validation = validated(job, rounds=3, kept=rounds_file(interrupted).rounds)
    assert job.ran == [Plan(), FAST, SLOW, Plan()] * 2
    assert (validation.rounds, validation.kept_rounds) == (3, 1)
    assert validation.plans[0].speedup_measured == pytest.approx(4 / 3, rel=0.02)


def test_with_all_rounds_kept_nothing_runs(interrupted):
    kept = rounds_file(interrupted).rounds * 2
    job = FakeJob(MEDIANS_US)
    validation = validated(job, rounds=2, kept=kept)
    assert (job.ran, validation.rounds, validation.kept_rounds) == ([], 2, 2)


def test_a_plan_that_failed_in_a_kept_round_is_not_run_again(tmp_path):
    kept = rounds_file(tmp_path)
    first = FakeJob(MEDIANS_US, fails=[(FAST, 1)])
    validated(first, rounds=2, on_round=kept.add)
    job = FakeJob(MEDIANS_US)
    validation = validated(job, rounds=3, kept=rounds_file(tmp_path).rounds)
    assert FAST not in job.ran
    assert validation.failed[0].reason == "failed at 1.0 us"


@pytest.mark.parametrize("change", [{"command": ("python", "other.py")}, {"plans": (SLOW, FAST)}, {"warmup": 6}])
def test_rounds_of_another_validation_are_not_used(interrupted, change):
    assert rounds_file(interrupted, **change).rounds == ()


def test_a_file_that_was_cut_off_loses_its_last_round_only(interrupted):
    path = interrupted / "rounds.jsonl"
    head, one = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + one + one[: len(one) // 2])
    assert len(rounds_file(interrupted).rounds) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"number":1', b'"number":7'),
        (b'"number":-1', b'"number":0'),
        (b'"iteration_us":[', b'"iteration_us":[-1.0,'),
        (b'"iteration_us":[', b'"iteration_us":[1e400,'),
        (b'"iteration_us":[', b'"iteration_us":[' + b"[" * 100_000),
    ],
)
def test_a_round_that_holds_no_measurement_is_not_used(interrupted, old, new):
    path = interrupted / "rounds.jsonl"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    assert rounds_file(interrupted).rounds == ()


def test_rounds_are_gone_once_the_validation_is_written(interrupted):
    rounds_file(interrupted).remove()
    assert list(interrupted.iterdir()) == []
    assert validate(FakeJob(MEDIANS_US), prediction(4e5), [(FAST, prediction(3e5))]).kept_rounds == 0
