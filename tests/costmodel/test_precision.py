"""Ratios of bfloat16 to float32: where they come from, what is not known, what casts cost, and how ops of two runs are paired."""

import gzip

import pytest

from dpro_search.costmodel.precision import (
    BUNDLED_TABLE,
    BUNDLED_TORCH_TABLE,
    CastRow,
    PrecisionModel,
    PrecisionRow,
    PrecisionTable,
    WorkloadTime,
    left_out_scores,
    named_model,
)
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError
from experiments.costmodel.precision import MeasuredOp, paired


def table(ratios: dict[str, float], more: tuple[PrecisionRow, ...] = (), casts: tuple[CastRow, ...] = ()) -> PrecisionTable:
    """Models with a matrix product each, whose time in bfloat16 is so many times as long, beside 100 us of what does not change."""
    rows = (*(PrecisionRow(name, "_MklMatMul", 1000.0, 1000.0 * ratio) for name, ratio in ratios.items()), *more)
    wholes = []
    for name in ratios:
        rows_of_model = [row for row in rows if row.workload == name]
        cast_us = sum(cast.us for cast in casts if cast.workload == name)
        before, after = (sum(getattr(row, f"{kind}_us") for row in rows_of_model) for kind in ("float32", "bfloat16"))
        wholes.append(WorkloadTime(name, 8, 100.0 + before, 100.0 + after + cast_us, 100.0))
    return PrecisionTable(machine="m", versions={}, measured_at="", workloads=tuple(wholes), rows=rows, casts=casts)


ALIKE = {"a": 0.5, "b": 0.5, "c": 0.5}


@pytest.mark.parametrize("op_type", ["_MklMatMul", "MatMul", "_MklNativeFusedMatMul"])
def test_a_ratio_is_for_all_types_of_its_kind(op_type):
    ratio, low, high = PrecisionModel.fit(table(ALIKE)).ratio(op_type)
    assert ratio == pytest.approx(0.5)
    assert low < 0.5 < high


def test_a_kind_that_was_not_measured_is_taken_for_its_family_with_less_certainty():
    model = PrecisionModel.fit(table({"a": 0.4, "b": 0.5, "c": 0.6}, (PrecisionRow("a", "Conv2D", 1000.0, 700.0),)))
    assert not model.knows("BatchMatMulV2")
    ratio, low, high = model.ratio("BatchMatMulV2")
    assert 0.45 < ratio < 0.65
    assert high / low > model.ratio("MatMul")[2] / model.ratio("MatMul")[1]


@pytest.mark.parametrize("op_type", ["SomethingNew", "Reshape", "AssignVariableOp", "Softmax"])
def test_what_no_family_tells_is_unknown(op_type):
    assert PrecisionModel.fit(table(ALIKE)).ratio(op_type) is None  # of arithmetic, nothing was measured


def test_models_that_differ_give_a_wide_interval():
    alike, apart = (PrecisionModel.fit(table(ratios)).ratio("MatMul") for ratios in (ALIKE, {"a": 0.4, "b": 0.5, "c": 0.625}))
    assert apart[0] == pytest.approx(0.5)
    assert apart[1] < 0.4 < 0.625 < apart[2]
    assert alike[2] < 0.625


def test_ops_of_a_family_gain_more_or_less_as_they_are_longer():
    """A hundredth of the time loses what ten times as long an op gains: the ratio falls with the square root of the time."""
    more = tuple(PrecisionRow(name, "_MklMatMul", us, us * 0.5 * (1000 / us) ** 0.5) for name in ALIKE for us in (100.0, 4000.0))
    model = PrecisionModel.fit(table(ALIKE, more))
    assert model.ratio("MatMul", 4000.0)[0] == pytest.approx(0.25, rel=0.05)
    assert model.ratio("MatMul", 100.0)[0] == pytest.approx(0.5 * 10**0.5, rel=0.05)
    assert model.ratio("MatMul", 1.0) == model.ratio("MatMul", 100.0), "not beyond what was measured"


def test_casts_have_their_own_cost():
    casts = tuple(CastRow(name, elements, 2.0 + elements / 1000) for name in ALIKE for elements in (1000, 10_000, 1_000_000))
    model = PrecisionModel.fit(table(ALIKE, casts=casts))
    assert model.cast_us(500_000) == pytest.approx(502.0)
    assert model.ratio("MatMul")[0] == pytest.approx(0.5)
    assert model.cast_share == pytest.approx(sum(cast.us for cast in casts) / 3000)


def test_a_model_is_judged_by_the_others():
    casts = (CastRow("a", 1000, 1.0), CastRow("b", 1000, 1.0), CastRow("d", 50_000, 60.0))
    scores = {score.workload: score for score in left_out_scores(table({**ALIKE, "d": 0.8}, casts=casts))}
    judged = scores["d"]
    assert judged.predicted_us == pytest.approx(100 + 500 + 50, rel=0.01)
    assert judged.error_pct == pytest.approx((650 / 960 - 1) * 100, abs=0.5)
    assert (judged.casts_us, judged.predicted_casts_us) == (60, pytest.approx(50, rel=0.01))
    assert (judged.inside, judged.kinds, judged.known) == (0, 1, 1.0)
    assert judged.interval_us[0] < judged.predicted_us < judged.interval_us[1] < 960


def test_a_table_is_saved_and_read(tmp_path):
    ours = table({"a": 0.5}, casts=(CastRow("a", 10, 1.0),))
    ours.save(tmp_path / "t.json.gz")
    assert PrecisionTable.load(tmp_path / "t.json.gz") == ours


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"hello", TraceFormatError),
        (gzip.compress(b"{}"), TraceFormatError),
        (gzip.compress(b'{"version": 2, "rows": 3}'), TraceFormatError),
        (gzip.compress(b'{"version": 99}'), TraceVersionError),
        (gzip.compress(b"[" * 10000)[:-9], TraceFormatError),
    ],
    ids=["text", "nothing", "other fields", "another version", "cut off"],  # gzip writes down the time
)
def test_damaged_and_foreign_tables_are_refused(tmp_path, content, error):
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(error, match=r"t\.json\.gz"):
        PrecisionTable.load(path)
    with pytest.raises(InputError, match="gone"):
        PrecisionTable.load(tmp_path / "gone")


FLOATS, HALVES = "(float[8,64])", "(bfloat16[8,64])"


def test_a_cast_stands_for_itself_and_the_update_does_not_change():
    plain = {
        "m/conv/Conv2D": MeasuredOp("Conv2D", 100.0, FLOATS),
        "m/conv/BiasAdd": MeasuredOp("BiasAdd", 10.0, FLOATS),
        "SGD/Mul": MeasuredOp("Mul", 7.0, FLOATS),
    }
    mixed = {
        "m/conv/Conv2D": MeasuredOp("Conv2D", 40.0, HALVES),
        "m/conv/Conv2D/Cast": MeasuredOp("Cast", 5.0, "(float[3,3,4])"),
        "m/conv/BiasAdd": MeasuredOp("BiasAdd", 8.0, HALVES),
        "SGD/Mul": MeasuredOp("Mul", 7.0, FLOATS),
    }
    pairs = paired("m", plain, mixed)
    assert pairs.rows == [PrecisionRow("m", "BiasAdd", 10.0, 8.0), PrecisionRow("m", "Conv2D", 100.0, 40.0)]
    assert pairs.casts == [CastRow("m", 36, 5.0)]
    assert pairs.unchanged_us == 7.0


def test_an_op_that_was_fused_in_one_precision_only_counts_with_its_scope():
    plain = {"m/conv/BiasAdd": MeasuredOp("_FusedConv2D", 100.0, FLOATS), "m/conv/Relu": MeasuredOp("Relu", 3.0, FLOATS)}
    mixed = {
        "m/conv/Conv2D": MeasuredOp("Conv2D", 40.0, HALVES),
        "m/conv/BiasAdd": MeasuredOp("BiasAdd", 8.0, HALVES),
        "m/conv/Relu": MeasuredOp("Relu", 2.0, HALVES),
    }
    pairs = paired("m", plain, mixed)
    assert pairs.rows == [PrecisionRow("m", "_FusedConv2D", 103.0, 50.0)]
    assert pairs.unchanged_us == 0.0


def test_the_table_that_is_bundled_is_of_many_models():
    assert len(PrecisionTable.load(BUNDLED_TABLE).workloads) >= 9
    assert 0.3 < named_model(BUNDLED_TABLE, "tensorflow").ratio("_MklNativeFusedConv2D")[0] < 0.9


def test_where_no_table_is_named_the_error_tells_of_the_one_that_there_is():
    with pytest.raises(InputError, match=r"to TensorFlow's ops .*samples/bfloat16-times\.json\.gz, of an AMD EPYC"):
        named_model(None, "tensorflow")
    with pytest.raises(InputError, match="the table is not of TensorFlow's ops"):
        named_model(BUNDLED_TORCH_TABLE, "tensorflow")
