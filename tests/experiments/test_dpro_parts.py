"""The parts of the dPRO page: shifted clocks come back, searches keep to their strategy, and nothing is computed twice."""

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from sample import sample

from dpro_search.collect.assemble.common import aligned
from dpro_search.errors import InputError
from dpro_search.search import run_search
from experiments.dpro.alignment import with_clocks
from experiments.dpro.figures import Panel, bars
from experiments.dpro.gains import FIELDS, STRATEGIES, restricted
from experiments.dpro.parts import Options, gathered, table
from experiments.dpro.published import replay_errors_pct
from experiments.dpro.recordings import recordings
from experiments.dpro.replay_accuracy import replay_accuracy
from tests.recordings import trace_of
from tests.sample import horovod_trace_path


@pytest.mark.parametrize("trace", [pytest.param(sample, id="tensorflow"), pytest.param(lambda: trace_of("ddp_mlp"), id="ddp")])
@pytest.mark.parametrize("shift_us", [5e4, -5e4])
def test_a_shift_of_a_rank_is_recovered_within_what_the_alignment_reports(trace, shift_us):
    off = with_clocks(trace(), [0.0, shift_us])
    report = aligned(off.events, ("host0", "host1"), [0.0, 0.0])
    assert abs(report.offset_us[1] - shift_us) <= report.residual_us[1]


@pytest.mark.parametrize("trace", [pytest.param(sample, id="tensorflow"), pytest.param(lambda: trace_of("ddp_mlp"), id="ddp")])
def test_clocks_that_are_set_back_give_the_recording_again(trace):
    whole = trace()
    restored = with_clocks(with_clocks(whole, [0.0, 1234.0]), [0.0, -1234.0])
    assert np.allclose(restored.events.start_us, whole.events.start_us, rtol=0, atol=1e-3)
    assert np.allclose(restored.events.end_us, whole.events.end_us, rtol=0, atol=1e-3)
    assert np.allclose(restored.steps.start_us, whole.steps.start_us, rtol=0, atol=1e-3)


def test_a_shift_moves_what_the_other_ranks_saw_only():
    off = with_clocks(sample(), [0.0, 1000.0])
    moved = off.events.start_us - sample().events.start_us
    assert np.allclose(moved, np.where(sample().events.rank == 1, 1000.0, 0.0))


def test_a_search_of_a_strategy_tries_its_plans_only(tmp_path):
    objective = restricted(sample(), "tensor fusion")
    tried = []
    run_search(objective, trials=30, out=tmp_path / "run", trace_digest="sample", on_trial=lambda trial: tried.append(trial.plan))
    assert {name for plan in tried for name in plan.settings} == {"fusion_threshold_bytes", "tensor_groups"}


def test_op_fusion_alone_is_searched_without_collectives_to_look_at(tmp_path):
    objective = restricted(sample(), "op fusion")
    tried = []
    run_search(
        objective, trials=4, sampler="critical-path", out=tmp_path / "run", trace_digest="sample",
        on_trial=lambda trial: tried.append(trial.plan),
    )  # fmt: skip
    assert {name for plan in tried for name in plan.settings} == set(FIELDS["op fusion"])


def test_a_strategy_that_a_job_does_not_have_leaves_nothing_to_search():
    assert not restricted(trace_of("ddp_mlp"), "partition").space.transformations
    assert [name for name in STRATEGIES if restricted(trace_of("ddp_mlp"), name).space.transformations] == ["tensor fusion", "all"]


class Number(msgspec.Struct):
    value: int


def test_rows_that_are_there_are_not_made_again(tmp_path):
    def failing():
        raise KeyboardInterrupt

    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        gathered(path, Number, {"a": lambda: Number(1), "b": failing, "c": lambda: Number(3)})
    assert json.loads(path.read_bytes()) == {"a": {"value": 1}}
    assert gathered(path, Number, {"a": failing, "b": lambda: Number(2)}) == {"a": Number(1), "b": Number(2)}


def measured(path: Path, us: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {"iteration_us": [us] * 10, "compute_cpu_us": [], "comm_cpu_us": [], "load_before": 0.0, "started_at": 0.0}
    path.write_text(json.dumps(run))


def test_recordings_are_found_in_both_layouts_with_the_plain_runs_beside_them(tmp_path):
    (tmp_path / "vgg16").mkdir()
    (tmp_path / "vgg16" / "trace-2gbit").symlink_to(horovod_trace_path())
    for name, us in (("base.0", 1e5), ("base-again.0", 3e5), ("threshold-0MiB.0", 9e5)):
        measured(tmp_path / "vgg16" / "truth-2gbit" / f"{name}.json", us)
    (tmp_path / "ps" / "bert" / "500mbit").mkdir(parents=True)
    (tmp_path / "ps" / "bert" / "500mbit" / "trace").symlink_to(horovod_trace_path())
    assert [found.name for found in recordings([tmp_path])] == ["tensorflow/vgg16/2gbit"]  # no plain run beside the other
    measured(tmp_path / "ps" / "bert" / "500mbit" / "base.0.json", 2e5)
    measured(tmp_path / "ps" / "bert" / "500mbit" / "1-server.0.json", 9e5)
    found = recordings([tmp_path])
    assert [recording.name for recording in found] == ["tensorflow/vgg16/2gbit", "ps/bert/500mbit"]
    assert [recording.plain_us() for recording in found] == [[1e5, 3e5], [2e5]]


def test_a_folder_without_recordings_is_refused(tmp_path):
    with pytest.raises(InputError, match="no recording with plain runs"):
        replay_accuracy(Options(results=tmp_path, folders=(tmp_path,)))


def test_the_papers_table_has_the_errors_that_the_paper_says():
    theirs, daydream = replay_errors_pct()
    assert (len(theirs), sum(error < 5 for error in theirs)) == (24, 17)
    assert (np.mean(theirs), max(theirs)) == (pytest.approx(3.21, abs=0.05), pytest.approx(7.35, abs=0.1))
    assert (np.mean(daydream), max(daydream)) == (pytest.approx(26.9, abs=0.1), pytest.approx(70.2, abs=0.1))


def test_a_chart_has_a_bar_for_each_value():
    panels = [Panel(title="one", groups=(("a", (0.5, None)), ("b <&> c", (1.0, 7.0))))]
    svg = ElementTree.fromstring(bars("title", ("first", "second"), panels, unit="times", top=2.0, line=1.0))
    space = "{http://www.w3.org/2000/svg}"
    drawn = [rect for rect in svg.iter(f"{space}rect") if rect.find(f"{space}title") is not None]
    assert [float(rect.attrib["height"]) for rect in drawn] == [37.5, 75.0, 150.0]
    assert "7" in [text.text for text in svg.iter(f"{space}text")]


def test_a_table_aligns_numbers_to_the_right():
    assert table(("name", "value#"), [("a", "1")]) == "| name | value |\n|---|---:|\n| a | 1 |\n"
