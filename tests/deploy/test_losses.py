"""A plan must train what the recorded setting trains: losses are read from what a script prints, and compared."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.deploy.losses import COMPARED_STEPS, Loss, Tolerance, compare, read_losses, tolerance_of
from dpro_search.runtime import HOOKS, TIMED
from dpro_search.space.plan import Plan
from tests.every_case import every_case

EXACT = Tolerance(relative=1e-4)


def losses(*values):
    return tuple(Loss(value) for value in values)


def printed(script, folder, path=(TIMED,), **env):
    """The losses that a script printed, and what it wrote."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "DPRO_SEARCH_REPORT": str(folder), **env}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return [loss.value for loss in read_losses(folder)], done


@every_case(
    "line",
    [
        "step 3 loss 4.605", "loss: 4.605", "Loss=4.605", "epoch 1, train_loss=4.605, accuracy 0.1", "{'loss': 4.605, 'lr': 1e-3}",
        "loss 0x1.26b851eb851ecp+2", "INFO:root:loss 4.605e0", "losses: [4.605, 3.1]",
    ],
)  # fmt: skip
def test_a_line_with_loss_and_a_number_has_a_loss(line, tmp_path):
    losses_seen, done = printed(f"print({line!r})", tmp_path)
    assert losses_seen == pytest.approx([4.605])
    assert done.stdout == line + "\n"


@pytest.mark.parametrize("line", ["lossless 3", "glossy 3", "no loss at all", "loss of the last 3 steps", "step 3"])
def test_other_lines_have_none(line, tmp_path):
    assert printed(f"print({line!r})", tmp_path)[0] == []


def test_lines_in_pieces_and_on_stderr_are_read(tmp_path):
    script = "import sys; print('lo', end=''); print('ss', 1.5); print('loss 2.5', file=sys.stderr)"
    assert printed(script, tmp_path)[0] == [1.5, 2.5]


def test_only_the_first_losses_are_kept(tmp_path):
    losses_seen, _ = printed("for i in range(100): print('loss', i)", tmp_path)
    assert losses_seen == list(range(COMPARED_STEPS))


def test_losses_of_the_lowest_rank_are_read(tmp_path):
    for rank in (1, 0):
        printed(f"print('loss', {rank + 10})", tmp_path, RANK=str(rank))
    assert [loss.value for loss in read_losses(tmp_path)] == [10.0]


def test_other_start_up_modules_run_as_well(tmp_path):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "sitecustomize.py").write_text("import builtins; builtins.found = 'loss 7'")
    losses_seen, _ = printed("print(found)", tmp_path, path=(HOOKS, TIMED, tmp_path / "user"))
    assert losses_seen == [7.0]


def test_without_the_variable_output_is_unchanged(tmp_path):
    script = "import sys; print(type(sys.stdout).__name__)"
    assert "TextIOWrapper" in printed(script, tmp_path, DPRO_SEARCH_REPORT="")[1].stdout


def test_equal_losses_are_the_same():
    base = losses(3.0, 2.0, 1.0)
    assert compare([base, base], [base], EXACT).verdict == "same"


def test_diverging_losses_are_different_and_the_difference_is_reported():
    base = losses(3.0, 2.0, 1.0)
    comparison = compare([base, base], [base, losses(3.0, 2.0, 1.1)], EXACT)
    assert comparison.verdict == "different"
    assert comparison.difference == pytest.approx(0.1 / 1.1)
    assert "differ, by more than 0.0001" in comparison.reason


@given(st.lists(st.floats(0.01, 10), min_size=3, max_size=20))
def test_rounding_in_print_is_no_difference(values):
    exact = losses(*values)
    rounded = tuple(Loss.parse(f"{value:.3f}") for value in values)
    assert compare([exact, rounded], [rounded], EXACT).verdict == "same"


def test_what_the_recorded_setting_differs_by_itself_is_allowed():
    base, again = losses(3.0, 2.0, 1.0), losses(3.0, 2.0, 1.01)
    assert compare([base, again], [losses(3.0, 2.0, 1.02)], EXACT).verdict == "same"


@pytest.mark.parametrize(
    ("recorded", "planned", "reason"),
    [
        ([(), ()], [()], "prints fewer than 3 losses"),
        ([losses(1.0, 1.0, 1.0), losses(2.0, 1.0, 1.0)], [losses(1.0, 1.0, 1.0)], "fix the job's seeds"),
    ],
)
def test_what_cannot_be_compared_is_unknown(recorded, planned, reason):
    comparison = compare(recorded, planned, EXACT)
    assert comparison.verdict == "unknown"
    assert reason in comparison.reason


def test_a_training_that_breaks_is_different():
    base = losses(3.0, 2.0, 1.0)
    comparison = compare([base, base], [losses(3.0, float("nan"), float("nan"))], EXACT)
    assert (comparison.verdict, comparison.difference) == ("different", None)


def test_half_precision_is_compared_by_convergence():
    base, rough = losses(3.0, 2.5, 2.0, 1.6, 1.2, 1.0), losses(3.1, 2.3, 2.2, 1.5, 1.25, 0.98)
    half = tolerance_of(Plan(bfloat16_ops=("a",)))
    assert half.by_convergence
    assert compare([base, base], [rough], half).verdict == "same"
    assert compare([base, base], [rough], EXACT).verdict == "different"
    assert compare([base, base], [losses(*[3.0] * 6)], half).verdict == "different"


def test_the_tolerance_is_that_of_a_plans_largest_change():
    assert tolerance_of(Plan(servers=2)).relative < tolerance_of(Plan(op_clusters=(("a",),))).relative
    assert tolerance_of(Plan(op_clusters=(("a",),))).relative < tolerance_of(Plan(micro_batches=2)).relative


def test_another_layout_of_a_job_in_16_bits_rounds_other_sums():
    split = Plan.of(tp=4)
    assert tolerance_of(split, "bf16").relative == 0.02
    assert tolerance_of(split, "fp32").relative == 1e-4
    assert tolerance_of(split, "fp8").by_convergence
    assert "bf16 rounds each part" in tolerance_of(split, "bf16").promise
