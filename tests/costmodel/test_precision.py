"""Ratios of bfloat16 to float32: where they come from, what is not known, and how ops of two runs are paired."""

import gzip

import pytest

from dpro_search.costmodel.precision import PrecisionModel, PrecisionRow, PrecisionTable, WorkloadTime, left_out_scores
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError
from experiments.costmodel.precision import MeasuredOp, paired


def table(ratios: dict[str, float], casts_us: float = 0.0) -> PrecisionTable:
    """Workloads with a matrix product each, whose time in bfloat16 is so many times as long, and a softmax in one of them."""
    rows = [PrecisionRow(name, "_MklMatMul", 1000.0, 1000.0 * ratio, casts_us) for name, ratio in ratios.items()]
    rows += [PrecisionRow("a", "Softmax", 500.0, 500.0, 0.0)]
    wholes = tuple(
        WorkloadTime(name, 8, 1100.0 + 500 * (name == "a"), 100.0 + 1000 * ratio + casts_us + 500 * (name == "a"), 100.0)
        for name, ratio in ratios.items()
    )
    return PrecisionTable(machine="m", versions={}, measured_at="", workloads=wholes, rows=tuple(rows))


def test_a_ratio_holds_the_casts_and_for_all_types_of_its_kind():
    model = PrecisionModel.fit(table({"a": 0.4, "b": 0.4, "c": 0.4}, casts_us=100.0))
    for op_type in ("MatMul", "_MklNativeFusedMatMul", "_MklMatMul"):
        ratio, low, high = model.ratio(op_type)
        assert ratio == pytest.approx(0.5)
        assert low < 0.5 < high


def test_workloads_that_differ_give_a_wide_interval():
    alike, apart = (
        PrecisionModel.fit(table(ratios)) for ratios in ({"a": 0.5, "b": 0.5, "c": 0.5}, {"a": 0.4, "b": 0.5, "c": 0.625})
    )
    assert apart.ratio("MatMul")[0] == pytest.approx(0.5)
    assert apart.ratio("MatMul")[1] < 0.4 < 0.625 < apart.ratio("MatMul")[2]
    assert alike.ratio("MatMul")[2] < 0.625


@pytest.mark.parametrize("op_type", ["Softmax", "Conv2D", "SomethingNew"])
def test_what_fewer_than_three_workloads_ran_is_unknown(op_type):
    assert PrecisionModel.fit(table({"a": 0.5, "b": 0.5, "c": 0.5})).ratio(op_type) is None


def test_a_workload_is_judged_by_the_others():
    scores = {score.workload: score for score in left_out_scores(table({"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.8}))}
    assert scores["d"].predicted_us == pytest.approx(600)
    assert scores["d"].error_pct == pytest.approx((600 / 900 - 1) * 100)
    assert (scores["d"].inside, scores["d"].kinds, scores["d"].known) == (0, 1, 1.0)
    assert scores["a"].known == pytest.approx(1000 / 1500)


def test_a_table_is_saved_and_read(tmp_path):
    ours = table({"a": 0.5})
    ours.save(tmp_path / "t.json.gz")
    assert PrecisionTable.load(tmp_path / "t.json.gz") == ours


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"hello", TraceFormatError),
        (gzip.compress(b"{}"), TraceFormatError),
        (gzip.compress(b'{"version": 1, "rows": 3}'), TraceFormatError),
        (gzip.compress(b'{"version": 99}'), TraceVersionError),
        (gzip.compress(b"[" * 10000)[:-9], TraceFormatError),
    ],
)
def test_damaged_and_foreign_tables_are_refused(tmp_path, content, error):
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(error, match=r"t\.json\.gz"):
        PrecisionTable.load(path)
    with pytest.raises(InputError, match="gone"):
        PrecisionTable.load(tmp_path / "gone")


def test_a_cast_counts_with_the_longest_op_around_it_and_the_update_not_at_all():
    plain = {
        "m/conv/Conv2D": MeasuredOp("Conv2D", 100.0, False),
        "m/conv/BiasAdd": MeasuredOp("BiasAdd", 10.0, False),
        "SGD/Mul": MeasuredOp("Mul", 7.0, False),
    }
    mixed = {
        "m/conv/Conv2D": MeasuredOp("Conv2D", 40.0, True),
        "m/conv/Conv2D/Cast": MeasuredOp("Cast", 5.0, False),
        "m/conv/BiasAdd": MeasuredOp("BiasAdd", 8.0, True),
        "SGD/Mul": MeasuredOp("Mul", 7.0, False),
    }
    rows, unchanged = paired("m", plain, mixed)
    assert rows == [PrecisionRow("m", "BiasAdd", 10.0, 8.0, 0.0), PrecisionRow("m", "Conv2D", 100.0, 40.0, 5.0)]
    assert unchanged == 7.0


def test_an_op_that_was_fused_in_one_precision_only_counts_with_its_scope():
    plain = {"m/conv/BiasAdd": MeasuredOp("_FusedConv2D", 100.0, False), "m/conv/Relu": MeasuredOp("Relu", 3.0, False)}
    mixed = {
        "m/conv/Conv2D": MeasuredOp("Conv2D", 40.0, True),
        "m/conv/BiasAdd": MeasuredOp("BiasAdd", 8.0, True),
        "m/conv/Relu": MeasuredOp("Relu", 2.0, True),
    }
    rows, unchanged = paired("m", plain, mixed)
    assert rows == [PrecisionRow("m", "_FusedConv2D", 103.0, 50.0, 0.0)]
    assert unchanged == 0.0


def test_what_was_measured_on_another_processor_says_nothing():
    assert PrecisionModel.bundled("Some Other Processor, 8 cores, Linux 6.1").ratio("MatMul") is None
