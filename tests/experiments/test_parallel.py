"""The campaign of parallel jobs: what is said of runs; real ones are in tests/integration."""

import pytest

from dpro_search.collect.tables.parallel_times import BlockTime, ParallelTimes
from dpro_search.deploy.step_split import StepSplit
from experiments.parallel.__main__ import print_splits
from experiments.parallel.cases import PACED_MICRO_BATCH, SEQUENCE, cases
from experiments.parallel.measure import Row, job_with, plan_of, prepared, save_row
from experiments.parallel.score import score

RECORDED = ParallelTimes(
    memory_bytes_per_s=1e10,
    flops_per_s=5e10,
    blocks=tuple(
        BlockTime(block=name, micro_batch=PACED_MICRO_BATCH, sequence=SEQUENCE, forward_us=us, backward_us=2 * us)
        for name, us in (("embedding", 100.0), ("layer", 1000.0), ("head", 300.0))
    ),
)
STRATEGIES = ("gpipe x dp", "1f1b x dp")


@pytest.fixture
def scored(tmp_path):
    """Two strategies of a job, the second without a split."""
    chosen = [case for case in cases(paced=True) if case.job == "paced-gpt-8-500mbit" and case.strategy in STRATEGIES]
    for case in chosen:
        case.write(tmp_path, 2)
        RECORDED.save(tmp_path / case.times)
    gpipe, other = chosen
    job = job_with(gpipe, tmp_path)
    split = prepared(job).split(plan_of(gpipe, job))
    for number, more in enumerate((0.02, 0.04)):
        measured = StepSplit(
            step_us=split.step_us,
            compute=split.compute,
            bubble=split.bubble + more,
            exposed_communication=split.exposed_communication - 0.07,
            contention=split.contention,
        )
        names = {"job": gpipe.job, "strategy": gpipe.strategy, "round": number}
        save_row(tmp_path, Row(**names, iteration_us=(1e6, 1e6), losses=(1.0,), split=measured))
    save_row(tmp_path, Row(job=other.job, strategy=other.strategy, round=0, iteration_us=(1e6, 1e6), losses=(1.0,)))
    return score(tmp_path, chosen)


def test_shares_of_a_paced_step_are_compared_with_the_prediction(scored):
    points = scored["rows"][0]["split"]["points"]
    assert points == pytest.approx({"bubble": -3.0, "exposed_communication": 7.0, "contention": 0.0})
    assert scored["rows"][1]["split"] is None
    splits = scored["splits"]
    assert (splits["rows"], splits["within"]) == (1, 0)
    assert splits["exposed_communication"] == pytest.approx({"median": 7.0, "worst": 7.0})


def test_the_table_has_a_line_for_each_case_that_was_split(scored, capsys):
    print_splits(scored["rows"])
    head, line = capsys.readouterr().out.splitlines()
    assert "bubble" in head
    assert line.startswith("paced-gpt-8-500mbit")
    assert "(-3.0)" in line
    assert "(+7.0)" in line
