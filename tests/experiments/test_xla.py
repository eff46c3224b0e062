"""Published TPU runs: which program a row is compiled as, and the arithmetic of its table."""

from __future__ import annotations

import pytest

from experiments.xla.predict import Predicted, SliceStep, model_flops, row_flops, weights
from experiments.xla.published import Row, cannot_rebuild, rematerialisation, request_of, requests_of, topology
from experiments.xla.table import summary, with_clock_efficiency

V5P = {
    "source": "maxtext-readme-v5p",
    "gpu": "TPU v5p",
    "n_gpus": "64",
    "model": "MaxText default 32B",
    "layers": "32",
    "hidden": "8192",
    "heads": "64",
    "kv_heads": "64",
    "ffn_hidden": "28672",
    "vocab": "32000",
    "tied_embeddings": "0",
    "seq_len": "2048",
    "precision": "bf16",
    "global_batch": "384",
    "recompute": "remat_policy=minimal",
    "step_time_s": "8",
    "mfu_pct": "60",
    "mesh": "fsdp=16 tensor=4",
    "notes": "31.7 B parameters; head_dim 128",
}


def row(number: int = 1, **values: str) -> Row:
    return Row(number, {**V5P, **values})


def result(number: int, predicted_s: float, measured_s: float, gpu: str = "TPU v5p") -> Predicted:
    mfu = f"{400 / measured_s:.3f}"
    step = SliceStep(step_us=predicted_s * 1e6, backward_us=0.0, parts_us={}, needed_bytes=1, available_bytes=2.0)
    return Predicted(row=row(number, gpu=gpu, mfu_pct=mfu), slice=step, between_slices_s=0.0, measured_s=measured_s)


def test_a_row_is_the_program_of_its_recipe():
    request = request_of(row())
    assert (request.on, request.mesh) == ("v5p:4x4x4", {"fsdp": 16, "tensor": 4})
    assert request.config["per_device_batch"] == 6
    assert request.config["offloaded"] == []
    assert {"query_proj", "mlpwo"} <= set(request.config["saved"])  # type: ignore[call-overload]


def test_slices_share_the_program_of_one():
    twice = row(2, n_gpus="128", global_batch="768", mesh="fsdp=16 tensor=4 dcn_data=2")
    assert request_of(twice).key == request_of(row()).key
    assert len(requests_of([row(), twice])) == 1


@pytest.mark.parametrize(
    ("generation", "chips", "name"), [("v4", 192, "v4:4x4x12"), ("v5p", 512, "v5p:8x8x8"), ("v6e", 256, "v6e:16x16")]
)
def test_chips_have_the_shape_that_cloud_gives_them(generation, chips, name):
    assert topology(generation, chips) == name


def test_rematerialisation_is_read_from_the_row():
    kept = rematerialisation("remat_policy=custom decoder_layer_input=device query_proj=remat out_proj=offload")
    assert kept == (["decoder_layer_input"], ["out_proj"])
    assert rematerialisation("remat_policy=full") == ([], [])


def test_rows_that_cannot_be_rebuilt_say_why():
    assert cannot_rebuild(row()) == ""
    assert "no batch" in cannot_rebuild(row(global_batch=""))
    assert "int8" in cannot_rebuild(row(precision="int8"))
    assert "mixture of experts" in cannot_rebuild(row(notes="decoder_block=mixtral"))


def test_weights_are_those_that_the_row_states():
    assert weights(request_of(row()).config) == pytest.approx(31.7e9, rel=2e-3)


def test_the_table_of_2023_is_of_the_models_that_its_names_tell():
    old = row(source="maxtext-readme-v4", gpu="TPU v4", model="MaxText default 22B", layers="48", hidden="6144", heads="24")
    old = row(1, **{**old.values, "kv_heads": "24", "ffn_hidden": "24576", "mesh": "fsdp=64", "recompute": "remat_policy=full"})
    config = request_of(old).config
    assert weights(config) == pytest.approx(22.1e9, rel=2e-3)
    assert row_flops(old) > model_flops(config)  # the row's step time was derived with 25.8 billion


def test_errors_and_order_of_a_source():
    results = [result(1, 9, 8), result(2, 11, 10), result(3, 12, 16)]
    figures = summary([(one, one.predicted_s) for one in results])
    assert figures.median_error == pytest.approx(0.125)
    assert figures.mean_error == pytest.approx((1 / 8 + 1 / 10 + 1 / 4) / 3)
    assert figures.tau == pytest.approx(1.0)


def test_a_clock_efficiency_mends_what_all_rows_have_in_common_and_is_not_scored_on_its_own_rows():
    results = [result(number, 2.0 * number, 1.0 * number) for number in range(1, 11)]
    factors, scored = with_clock_efficiency(results)
    assert factors == {"v5p": pytest.approx(0.5)}
    assert len(scored) == 8
    assert all(seconds == pytest.approx(one.measured_s) for one, seconds in scored)
