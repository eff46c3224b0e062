"""`diff` of two recordings of a job: its causes add up, name what changed, and can gate a CI."""

import json
from pathlib import Path

import pytest
from importer_kit import shared_trace, shared_traces
from kineto_machine import Launch, Program, Synchronize, run

from dpro_search.analysis.difference import difference as compared
from dpro_search.kinds import job_of
from tests.in_process import dpro
from tests.profiles import under

BEFORE: Program = [Launch("gemm", 10, 400), Launch("relu", 10, 100), Synchronize(50)]
SLOWER: Program = [Launch("gemm", 10, 500), Launch("relu", 10, 100), Synchronize(50)]


def difference(*args: object) -> dict:
    done = dpro("diff", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imported(source: Path, out: Path) -> Path:
    done = dpro("import", source, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("diff")
    before, after = (run(program, 6)[0] for program in (BEFORE, SLOWER))
    return (
        imported(before.write(folder / "before.json"), folder / "before"),
        imported(after.write(folder / "after.json"), folder / "after"),
    )


def test_the_op_that_got_slower_explains_the_change(traces):
    facts = difference(*traces)
    assert facts["change_us"] == pytest.approx(100, abs=1)
    largest = facts["causes"][0]
    assert (largest["name"], largest["part"]) == ("gemm", "compute")
    assert largest["change_us"] == pytest.approx(100, abs=1)


def test_the_causes_add_up_to_the_change(traces):
    for pair in (traces, traces[::-1], (traces[0], traces[0])):
        facts = difference(*pair)
        assert sum(cause["change_us"] for cause in facts["causes"]) == pytest.approx(facts["change_us"], abs=1e-6)
        for place, key in enumerate(("before_us", "after_us")):
            assert sum(cause[key] for cause in facts["causes"]) == pytest.approx(facts["iteration_us"][place])


def test_a_regression_beyond_the_limit_fails(traces):
    assert dpro("diff", *traces, "--max-regression", "30%").returncode == 0
    failed = dpro("diff", *traces, "--max-regression", "3%", "--json")
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["exceeded"] is True
    assert dpro("diff", *traces[::-1], "--max-regression", "0%").returncode == 0, "faster is no regression"


def test_two_real_recordings_of_one_model_differ_where_the_loader_does(tmp_path):
    kineto = shared_traces() / "kineto_single"
    pair = [imported(kineto / f"resnet50_v100_workers{n}.json.gz", tmp_path / str(n)) for n in (0, 4)]
    facts = difference(*pair)
    assert sum(cause["change_us"] for cause in facts["causes"]) == pytest.approx(facts["change_us"], abs=1e-3)
    done = dpro("diff", *pair)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "what explains the change" in done.stdout


@pytest.mark.parametrize(
    ("args", "reason"),
    [(("--max-regression", "many"), "'many' is not a share"), (("--max-regression", "-1"), "'-1' is not a share")],
)
def test_bad_limits_are_one_line(traces, args, reason):
    done = dpro("diff", *traces, *args)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert reason in line


def test_recordings_of_different_kinds_of_jobs_are_refused(traces):
    sample = Path(__file__).parents[2] / "dpro_search" / "samples" / "resnet50_2ranks_2gbit"
    done = dpro("diff", traces[0], sample)
    assert done.returncode == 2
    assert "give two recordings of one job" in done.stderr


def test_the_rank_that_does_more_comes_first_and_the_others_wait_for_it():
    recorded = job_of(shared_trace("kineto_dlrm_8ranks"))
    answer = compared(recorded, under(recorded.job, "rank6.host=2"))
    assert answer.change_us > 1000
    first, *others = answer.ranks
    assert first.rank == 6
    for row in answer.ranks:
        assert sum(row.change_us.values()) == pytest.approx(answer.change_us, rel=1e-6)
    assert max(row.change_us["waiting_for_ranks"] for row in others) > first.change_us["waiting_for_ranks"]


def test_kernels_have_the_names_that_tell_them_apart(tmp_path):
    long = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float> >(int, at::native::{}<float>, float*)"
    names = [long.format(name, name) for name in ("AddFunctor", "MulFunctor")]
    pair = [
        imported(
            run([*(Launch(name, 10, us) for name in names), Synchronize(50)], 5)[0].write(tmp_path / f"{us}.json"),
            tmp_path / str(us),
        )
        for us in (100, 200)
    ]
    shown = dpro("diff", *pair).stdout
    assert "AddFunctor>" in shown
    assert "MulFunctor>" in shown
    assert "at::native" not in shown


def test_a_regression_within_the_noise_does_not_fail(tmp_path):
    before, after = (
        imported(
            run([Launch("gemm", 10, us), Synchronize(50)], 6, jitter_us=600)[0].write(tmp_path / f"{us}.json"), tmp_path / str(us)
        )
        for us in (400, 460)
    )
    facts = difference(before, after)
    assert 3 < facts["regression_pct"] < facts["noise_pct"]
    done = dpro("diff", before, after, "--max-regression", "3%")
    assert done.returncode == 0
    assert "no more than equal jobs differ by" in done.stdout
