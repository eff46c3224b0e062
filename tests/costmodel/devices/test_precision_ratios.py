"""Ratios of kernels in another precision on one GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro_search.cluster import bundled
from dpro_search.costmodel.devices import OpSpec
from dpro_search.costmodel.devices.ratios import PAIR_ERROR, PrecisionRatios
from dpro_search.costmodel.roofline import element_precision, product_precisions
from dpro_search.errors import InputError
from tests.every_case import every_case

SAILOR = Path(__file__).parents[4] / "shared" / "devices" / "sailor" / "ops.parquet"
LARGE = OpSpec.of("gemm", "fp32", m=4096, n=4096, k=4096)
SMALL = OpSpec.of("gemm", "fp32", m=64, n=64, k=64)


def on(name: str) -> PrecisionRatios:
    return PrecisionRatios(bundled.device(name))


@every_case(
    "device, before, after, low, high",
    [("v100", "fp32", "fp16", 0.1, 0.2), ("a100", "tf32", "bf16", 0.45, 0.6), ("a100", "fp32", "bf16", 0.05, 0.1)],
)
def test_a_large_product_changes_nearly_as_the_peaks_do(device: str, before: str, after: str, low: float, high: float) -> None:
    ratio = on(device).of_product(LARGE, before, after)
    assert low < ratio.middle < high
    assert ratio.low == pytest.approx(ratio.middle / PAIR_ERROR)
    assert ratio.high == pytest.approx(ratio.middle * PAIR_ERROR)


@every_case("spec", [None, SMALL])
def test_products_of_unknown_sizes_and_short_ones_lie_between_peaks_and_bytes(spec: OpSpec | None) -> None:
    ratio = on("v100").of_product(spec, "fp32", "fp16")
    assert ratio.middle == pytest.approx((15.7 / 125 * 0.5) ** 0.5)
    assert (ratio.low, ratio.high) == (pytest.approx(15.7 / 125 / 1.3), pytest.approx(0.5 * 1.3))


def test_no_wider_type_makes_a_product_faster_and_the_same_changes_nothing() -> None:
    assert on("a100").of_product(None, "tf32", "fp32").low == 1
    assert on("a100").of_product(LARGE, "bf16", "tf32").low >= 1
    assert on("a100").of_product(LARGE, "bf16", "bf16") == (1, 1, 1)


def test_a_device_without_a_peak_is_named() -> None:
    with pytest.raises(InputError, match="V100 SXM2 32GB: its peak in fp8 is not known"):
        on("v100").of_product(None, "fp32", "fp8")


def test_memory_bound_kernels_change_by_bytes() -> None:
    assert PrecisionRatios.of_bytes("fp32", "bf16").middle == 0.5
    assert PrecisionRatios.of_bytes("fp16", "bf16") == (1, 1, 1)
    assert on("a100").moved_us(1.5e9) == pytest.approx(1e3, rel=0.35)
    assert on("a100").moved_us(1) == 2


@every_case(
    "name, dtype, expected",
    [
        ("ampere_sgemm_128x128_tn", "", ("fp32",)),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>", "", ("fp32",)),
        ("cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4", "", ("tf32",)),
        ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_tn", "", ("fp16",)),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "", ("bf16",)),
        ("flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "", ("bf16",)),
        ("nvjet_sm90_qqtst_128x128", "", ("fp8",)),
        ("nvjet_tst_128x64", "bfloat16", ("bf16",)),
        ("some_gemm", "float32", ("fp32", "tf32")),
        ("some_gemm", "", ()),
    ],
)
def test_the_recorded_precision_is_known_by_name_or_type_or_is_not(name: str, dtype: str, expected: tuple[str, ...]) -> None:
    assert product_precisions(name, dtype) == expected


def test_what_a_kernel_reads_is_known_by_type_or_name_or_is_not() -> None:
    assert element_precision("vectorized_elementwise_kernel<4, AddFunctor<float> >", "") == "fp32"
    assert element_precision("vectorized_elementwise_kernel<4, AddFunctor<c10::BFloat16> >", "") == "bf16"
    assert element_precision("vectorized_elementwise_kernel<4, AddFunctor<c10::Half> >", "") == "fp16"
    assert element_precision("vectorized_elementwise_kernel", "float16") == "fp16"
    assert element_precision("vectorized_elementwise_kernel<float>", "int64") == "other"
    assert element_precision("triton_poi_fused_0", "") == ""


@pytest.mark.skipif(not SAILOR.is_file(), reason="no shared measurements")
def test_pairs_of_measured_products_hold_within_their_interval() -> None:
    """Products that Sailor measured in fp32 (TF32) and in fp16 on five GPUs; shorter ones are mostly their launch."""
    from experiments.devices import sailor
    from experiments.devices.table import device_of, read_columns

    columns = read_columns(SAILOR, sailor._NEEDED, [])
    assert columns is not None
    rows = [
        dict(zip(sailor._NEEDED, row, strict=True)) for row in zip(*(columns[key].tolist() for key in sailor._NEEDED), strict=True)
    ]
    rows = [row for row in rows if not row["oom"] and row["tp"] == 1 and row["op_name"] in ("enc-attention-qkv", "enc-MLP-GEMM-1")]
    pairs: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in rows:
        pairs.setdefault((row["device"], row["model"], row["op_name"], row["mbs"]), {})[row["dtype"]] = row["fwd_us"]
    hidden = {"OPT-350": 1024, "GPT-Neo-2.7": 2560, "OPT-30": 7168}
    errors = []
    for (name, model, op, batch), us in pairs.items():
        if not {"fp16", "fp32"} <= us.keys() or us["fp16"] < 300 or max(us.values()) > 1e6 or model not in hidden:
            continue
        try:
            device = device_of(name, {})
        except InputError:
            continue
        width = hidden[model]
        spec = OpSpec.of("gemm", "fp32", m=batch * sailor.SEQUENCE, n=(3 if "qkv" in op else 4) * width, k=width)
        single = "fp32" if device.peak.tf32 is None else "tf32"
        errors.append(np.log(PrecisionRatios(device).of_product(spec, single, "fp16").middle * us["fp32"] / us["fp16"]))
    assert len(errors) >= 50
    assert np.mean(np.abs(errors) < np.log(PAIR_ERROR)) >= 0.9
