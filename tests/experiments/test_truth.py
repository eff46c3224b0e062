"""``experiments.truth score``: errors of predictions of published runs, and why rows are left out."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dpro_search.parallel.costs.domain import Domain
from experiments.truth import __main__ as truth
from experiments.truth.contradictions import contradictions
from experiments.truth.orders import ordered, pairs
from experiments.truth.page import _ticks, write_page
from experiments.truth.pooling import Errors, pooled
from experiments.truth.rows import Row, publisher_of
from experiments.truth.score import Predicted, Scored, figures
from tests.experiments.published_rows import HEAD, RUN, row
from tests.in_process import called


def score(folder, *options):
    return called(truth, "score", folder, *options)


@pytest.fixture
def runs(tmp_path):
    rows = [
        RUN.format(source="one", status="ok", seconds=4, memory=60),
        RUN.format(source="one", status="oom", seconds="", memory=""),
        RUN.format(source="two", status="ok", seconds=8, memory="").replace("H100", "K80"),
    ]
    (tmp_path / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return tmp_path


def test_the_table_has_every_run_with_its_interval_and_what_formulas_say(runs, tmp_path):
    done = called(truth, "table", runs, "--out", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page" / "accuracy.html").read_text()
    data = json.loads(page.split('<script id="data" type="application/json">')[1].split("</script>")[0])
    (run,) = data["runs"]
    assert (run["source"], run["gpu"], run["measured"]) == ("one", "H100", 4.0)
    assert run["interval"][0] < run["predicted"] < run["interval"][1]
    assert len(run["peers"]) == len(data["peers"]) == 2
    assert "{{" not in page


def test_errors_are_given_for_each_source_and_in_all(runs):
    facts = json.loads(score(runs, "--json").stdout)
    assert (facts["all"]["rows"], facts["all"]["supported"]) == (2, 1)
    one = facts["source"]["one"]
    keys = {
        "rows",
        "supported",
        "mape_pct",
        "median_ape_pct",
        "p90_ape_pct",
        "bias_pct",
        "kendall_tau",
        "memory_rows",
        "memory_mape_pct",
        "memory_median_ape_pct",
        "memory_within_5_pct",
        "oom",
    }
    assert keys | {"seconds_per_row"} == set(one)
    assert one["mape_pct"] == abs(one["bias_pct"]) < 50


def test_calibration_is_scored_on_rows_that_it_was_not_fitted_to(tmp_path):
    """Runs that all take 1.4 times as long: the fifth says so, and the others come out nearer."""
    cold = json.loads(score(written(tmp_path, 1.0), "--json").stdout)
    error = cold["all"]["bias_pct"] / 100
    slower = [
        json.loads(score(written(tmp_path, 1.4 * (1 + error)), *options, "--json").stdout)
        for options in ((), ("--calibrated", "0"))
    ]
    assert slower[0]["all"]["mape_pct"] == pytest.approx(100 * (1 - 1 / 1.4), abs=5)
    assert slower[1]["all"]["mape_pct"] < slower[0]["all"]["mape_pct"] * 0.7  # two rows against what is assumed before
    assert slower[1]["all"]["rows"] == 8  # of ten groups


def written(folder, factor):
    """Runs of ten batch sizes, so as many groups."""
    batches = [64 + 8 * number for number in range(10)]
    rows = (
        RUN.format(source="one", status="ok", seconds=factor * batch / 16, memory="").replace(",64,NeMo", f",{batch},NeMo")
        for batch in batches
    )
    (folder / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return folder


def test_intervals_are_those_of_other_sources(tmp_path):
    rows = [
        RUN.format(source=name, status="ok", seconds=seconds, memory="") for name, seconds in (("one", 4), ("two", 4), ("three", 8))
    ]
    (tmp_path / "runs.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    facts = json.loads(score(tmp_path, "--intervals").stdout)
    assert facts["ratio"]["bound by the device"]["rows"] == 3
    assert facts["coverage_of_source_left_out"] == {"one": 1.0, "two": 1.0, "three": 0.0}


def test_intervals_of_one_source_are_one_line(runs):
    done = score(runs, "--intervals")
    assert (done.returncode, done.stdout) == (2, "")
    assert "at least two sources" in done.stderr


def test_rows_that_are_left_out_are_counted_with_the_reason(runs):
    facts = json.loads(score(runs, "--json").stdout)
    assert facts["unsupported"] == [{"source": "two", "reason": "no bundled machine or device has the GPU K80", "rows": 1}]


def test_a_folder_without_runs_is_one_line(tmp_path):
    done = score(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CSV files of runs" in done.stderr


def test_a_throughput_that_is_too_little_for_the_time_to_the_target_is_that_of_one_gpu() -> None:
    """5,000 samples reach the target: 8 GPUs at 10/s in 500 s, or, as one of the rows has it, at 1.25/s."""

    def run(gpus: int, rate: float, seconds: float) -> Row:
        notes = f"time-to-train median {seconds} s"
        return row(source="a", model="net", gpu="H100", n_gpus=gpus, samples_per_s=rate, notes=notes)

    rows = [run(8, 10, 500), run(8, 1.25, 500), run(16, 19, 280), run(1, 1.3, 4000)]
    assert list(contradictions(rows)) == [1]


def test_a_throughput_in_another_unit_is_far_below_that_of_the_same_network_and_gpu() -> None:
    rows = [row(source="a", model="net", gpu="H100", n_gpus=8, samples_per_s=rate) for rate in (8e6, 9e6, 70.0)]
    assert list(contradictions(rows)) == [2]
    assert not contradictions([*rows[:2], row(source="b", model="net", gpu="H100", n_gpus=8, samples_per_s=70.0)])


def test_a_step_faster_than_the_peak_of_the_devices_contradicts() -> None:
    """Llama of 6.9 billion parameters in matmuls, 262,144 tokens on 8 H100: 1.37 s at the peak."""
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    assert not contradictions([Row(values)])
    assert list(contradictions([Row({**values, "step_time_s": "1.0"})])) == [0]


def learned(errors: list[float], groups: list[str], kind: str = "framework") -> float:
    """The factor that is learned from errors (logarithms) of one kind."""
    kinds = [("gpu", kind, "publisher")] * len(errors)
    rows = Errors(errors=np.array(errors), slopes=np.ones((len(errors), 1)), kinds=kinds, groups=groups)
    return float(pooled(rows).parameters(("gpu", kind, "publisher"))[0])


def test_what_is_learned_from_few_groups_is_nearer_to_nothing() -> None:
    one = learned([0.3] * 12, ["a"] * 12)
    many = learned([0.3, 0.28, 0.32] * 4, list("abcdefghijkl"))
    assert 0 < one < many < 0.32
    assert one < 0.2


def test_without_rows_nothing_is_learned() -> None:
    rows = Errors(errors=np.zeros(0), slopes=np.zeros((0, 2)), kinds=[], groups=[])
    assert list(pooled(rows).parameters(("gpu", "framework", "publisher"))) == [0.0, 0.0]
    assert pooled(rows).share(("gpu", "framework", "publisher")) == 0.0


def test_an_impossible_group_moves_nothing() -> None:
    groups = list("abcdefghijkl")
    kept = learned([0.1] * 12, groups)
    moved = learned([*[0.1] * 11, 9.0], groups)
    assert moved == pytest.approx(kept, abs=0.03)


def test_kinds_share_what_their_framework_has() -> None:
    kinds = [(f"gpu {number}", name, "publisher") for name in ("one", "other") for number in range(6)]
    errors = np.array([0.3] * 6 + [0.0] * 6)
    shifts = pooled(
        Errors(errors=errors, slopes=np.ones((12, 1)), kinds=kinds, groups=[str(place) for place in range(12)])
    ).parameters
    assert shifts(("another gpu", "one", "publisher"))[0] > 2 * abs(shifts(("another gpu", "other", "publisher"))[0])
    assert shifts(("another gpu", "another", "publisher"))[0] == 0


def test_parameters_that_do_not_help_rows_left_out_are_not_used() -> None:
    """GPUs of one framework that err alike, and ones of which each says the opposite of the next; ten groups of each."""
    kinds = [(f"gpu {number}", "framework", "publisher") for number in range(4) for _ in range(10)]
    signs = {"alike": [1, 1, 1, 1], "opposite": [1, -1, 1, -1]}
    shifts = {}
    for name, of_gpus in signs.items():
        errors = np.array([0.3 * of_gpus[number] for number in range(4) for _ in range(10)])
        shifts[name] = pooled(Errors(errors=errors, slopes=np.ones((40, 1)), kinds=kinds, groups=[str(row) for row in range(40)]))
    unseen, seen = (("gpu 5", "framework", "publisher"), ("gpu 0", "framework", "publisher"))
    assert shifts["alike"].share(unseen) == shifts["alike"].share(seen) == shifts["opposite"].share(seen) == 1
    assert shifts["opposite"].share(unseen) == 0


def test_parameters_of_other_publishers_count_as_far_as_they_help_one_that_is_left_out() -> None:
    """Publishers of one GPU and framework, each of which says the opposite of the next; all of a publisher's GPUs agree."""
    kinds = [(f"gpu {number % 4}", "framework", f"publisher {number // 4}") for number in range(16)]
    errors = np.array([0.3 * (-1) ** (number // 4) for number in range(16)])
    fit = pooled(Errors(errors=errors, slopes=np.ones((16, 1)), kinds=kinds, groups=[str(row) for row in range(16)]))
    assert fit.share(("gpu 0", "framework", "another")) == 0
    assert fit.share(("another gpu", "framework", "publisher 0")) > 0


def test_orders_are_surer_where_predictions_are_further_apart() -> None:
    """Runs of one group that all are in the predicted order: surer than a half, and no less sure with the gap."""
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    plans = [({"micro_batch": str(size)}, 4.0 / size) for size in (1, 2, 4, 8)]
    scored = [Scored(Row({**values, **change, "step_time_s": str(seconds)}), Predicted(seconds**0.9)) for change, seconds in plans]
    shares = ordered(scored)[Domain.DEVICE]
    assert shares == tuple(sorted(shares))
    assert shares[0] == 0.5 < shares[-1]
    assert not list(pairs([scored[0], replace(scored[0], prediction=Predicted(1.0))])), "the same plan twice is no pair"


def test_the_regret_is_what_the_plan_called_best_takes_more_than_the_best() -> None:
    """Of four plans; the one that is predicted to be fastest is not predicted to fit."""
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    plans = {4.0: Predicted(3.0), 8.0: Predicted(1.0, fits=False), 5.0: Predicted(2.0), 6.0: Predicted(4.0)}
    scored = [Scored(Row({**values, "step_time_s": str(seconds)}), said) for seconds, said in plans.items()]
    shown = figures(scored, len(scored))
    assert (shown["regret_mean_pct"], shown["regret_median_pct"]) == (25.0, 25.0)
    assert "regret_mean_pct" not in figures(scored[:2], 2), "two plans are no choice"


def test_the_page_has_a_line_and_a_panel_for_each_source(tmp_path) -> None:
    text = [line.split(",") for line in (HEAD, RUN.format(source="one", status="ok", seconds=4, memory=""))]
    values = dict(zip(*text, strict=True))
    scored = [Scored(Row({**values, "source": name}), Predicted(3.0)) for name in ("one", "two")]
    write_page(tmp_path, scored, {"halved": lambda seed: [replace(scored[0], prediction=Predicted(4.0))]}, range(2))
    page, drawn = (tmp_path / "page.md").read_text(), (tmp_path / "measured_predicted.svg").read_text()
    assert "| one | 1 | 25.0 " in page
    assert "| 0.0 (25.0) | 0 |" in page
    assert drawn.count('class="name"') == 2
    assert drawn.count("measured step<") == drawn.count("predicted step<") == 2
    assert "M" in drawn


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.004, 3.0, [0.01, 0.1, 1.0]), (0.9, 4.5, [1.0, 2.0]), (1.1, 1.9, []), (0.009, 1100.0, [0.01, 1.0, 100.0])],
)
def test_axes_have_whole_decades_or_parts_of_one(low, high, expected) -> None:
    assert _ticks(low, high) == pytest.approx(expected)


def test_rounds_and_tables_of_one_publisher_are_left_out_together():
    sources = ("mlperf-v5.0", "mlperf-v5.1", "dgxc-benchmarking", "nemo-perf-docs", "internevo")
    assert [publisher_of(source) for source in sources] == ["MLPerf", "MLPerf", "NVIDIA", "NVIDIA", "internevo"]
