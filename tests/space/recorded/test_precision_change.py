"""Another precision changes what autocast changes, op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_files import AUTOGRAD, START, Profile

from dpro_search.cluster import bundled
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.roofline import LEAST_US
from dpro_search.space.recorded.events import LAUNCHES
from dpro_search.space.recorded.ops import RecordedOps, recorded_ops
from dpro_search.space.recorded.precision_change import PrecisionChange, precision_change
from tests.every_case import every_case

SGEMM, RELU = "ampere_sgemm_128x128_tn", "vectorized_elementwise_kernel<4, relu<float> >"
NORM, SUM = "layer_norm_kernel<float>", "vectorized_elementwise_kernel<4, CUDAFunctor_add<float> >"
ADAM = "multi_tensor_apply_kernel<AdamFunctor<float> >"
LINEAR = ("aten::addmm", SGEMM, [[512], [1024, 256], [256, 512]])
ODD = ("aten::addmm", SGEMM, [[50], [1024, 256], [256, 50]])
HOST_US, KERNEL_US = 20.0, 100.0

Op = tuple[str, str, list[list[int]]]


def profiled(tmp_path: Path, forward: list[Op], backward: list[Op] = [], *, dtype: str = "float", shapes: bool = True) -> Trace:  # noqa: B006
    """Three steps of ops, each with one kernel; the backward pass has a thread of its own, and the optimizer one kernel."""
    profile = Profile()
    for number in range(3):
        begin = START + 10_000 * number
        at, end_us = begin, float(begin)

        def run(op: Op, tid: int = 100) -> None:
            nonlocal at, end_us
            name, kernel, sizes = op
            args: dict[str, Any] = {"Input Dims": sizes, "Input type": [dtype] * len(sizes)} if shapes else {}
            profile.op(name, at + HOST_US - 5, 15, tid, **args)
            end_us = max(at + HOST_US + 6, end_us) + KERNEL_US
            profile.kernel(kernel, end_us - KERNEL_US, KERNEL_US, launched=at + HOST_US, tid=tid, call_us=5)
            at += HOST_US + 10

        for op in forward:
            run(op)
        for op in backward:
            profile.op(f"autograd::engine::evaluate_function: {op[0]}", at, HOST_US + 11, AUTOGRAD)
            run(op, AUTOGRAD)
        profile.op("Optimizer.step#Adam.step", at, HOST_US + 11)
        run(("aten::_fused_adam_", ADAM, [[8]]))
        profile.step(number, begin, 9_000)
    return read([profile.write(tmp_path / "trace.json")])


def changed(trace: Trace, precision: str, device: str = "a100") -> tuple[RecordedOps, PrecisionChange]:
    ops = recorded_ops(trace)
    return ops, precision_change(trace, ops, bundled.device(device), precision)


def kernel(trace: Trace, ops: RecordedOps, change: PrecisionChange, name: str, place: int = 0) -> list[float]:
    """Middle, low and high duration of a kernel in the second step, without casts."""
    rows = [row for row in np.flatnonzero((ops.event >= 0) & (ops.step == ops.steps[1])).tolist() if ops.name[row].startswith(name)]
    ends = change.applied([ops] * 3)
    return [float(one.duration_us[rows[place]] - change.added_us[end, rows[place]]) for end, one in enumerate(ends)]


def test_what_follows_a_product_reads_half_the_bytes_or_as_many_as_before(tmp_path: Path) -> None:
    trace = profiled(tmp_path, [("aten::relu", RELU, [[1024, 256]]), LINEAR, ("aten::relu", RELU, [[1024, 512]])])
    ops, change = changed(trace, "bf16")
    moved_us = KERNEL_US - LEAST_US
    assert kernel(trace, ops, change, RELU, 0) == pytest.approx([100, LEAST_US + moved_us * 0.5 / 1.3, 100])
    assert kernel(trace, ops, change, RELU, 1) == pytest.approx([LEAST_US + moved_us * 0.5, LEAST_US + moved_us * 0.5 / 1.3, 100])
    assert kernel(trace, ops, change, SGEMM)[0] < 25


def test_norms_and_the_optimizer_stay_and_the_residual_sum_is_in_single_precision(tmp_path: Path) -> None:
    ops_of_block: list[Op] = [
        ("aten::native_layer_norm", NORM, [[1024, 256], [256]]), LINEAR, ("aten::add", SUM, [[1024, 512], [1024, 512]]),
    ]  # fmt: skip
    trace = profiled(tmp_path, ops_of_block)
    ops, change = changed(trace, "bf16")
    assert kernel(trace, ops, change, NORM) == [100, 100, 100]
    assert kernel(trace, ops, change, ADAM) == [100, 100, 100]
    assert kernel(trace, ops, change, SUM)[0] == 100
    without_norm = profiled(tmp_path, ops_of_block[1:])
    ops, change = changed(without_norm, "bf16")
    assert kernel(without_norm, ops, change, SUM)[0] < 60


def test_each_cast_takes_its_bytes_and_a_launch_and_has_one_of_the_gradient(tmp_path: Path) -> None:
    """The first product casts its weight and its input, the second its weight alone; the backward pass casts three gradients."""
    second: Op = ("aten::addmm", SGEMM, [[256], [1024, 512], [512, 256]])
    gradients: list[Op] = [("aten::mm", SGEMM, [[1024, 256], [256, 512]]), ("aten::mm", SGEMM, [[256, 1024], [1024, 512]])]
    trace = profiled(tmp_path, [LINEAR, ("aten::relu", RELU, [[1024, 512]]), second], gradients)
    ops, change = changed(trace, "bf16")
    step = ops.step == ops.steps[1]
    casts = 6  # of three tensors
    on_device_us = float(change.added_us[0, step & ops.on_device].sum())
    assert casts * LEAST_US <= on_device_us < casts * 5
    host = step & (ops.role == LAUNCHES) & (change.added_us[0] > 0)
    launch_us = float(np.median(ops.duration_us[[row for row in np.flatnonzero(ops.role == LAUNCHES) if RELU in ops.name[row]
                                                 and "launch of " not in ops.name[row][:10]]]))  # fmt: skip
    assert change.added_us[0, host].sum() == pytest.approx(casts * launch_us)
    assert any("6 casts a step and rank" in sentence for sentence in change.assumed)
    products = [float(change.added_us[0, row]) for row in np.flatnonzero(step & ops.on_device) if SGEMM in ops.name[row]]
    assert products[0] > products[1]  # two tensors, and one
    assert products[2] == pytest.approx(products[3])  # gradients are spread over the products of the backward pass


def test_what_ran_in_16_bits_keeps_its_casts_and_types_in_any_other_16_bits(tmp_path: Path) -> None:
    trace = profiled(
        tmp_path,
        [
            ("aten::addmm", "ampere_bf16_s16816gemm_bf16_128x64", LINEAR[2]),
            ("aten::relu", RELU.replace("float", "c10::BFloat16"), [[9]]),
        ],
        dtype="c10::BFloat16",
    )
    ops, change = changed(trace, "bf16")
    assert (change.ratio == 1).all()
    assert (change.added_us == 0).all()
    ops, wider = changed(trace, "fp32")
    assert kernel(trace, ops, wider, "vectorized")[0] == pytest.approx(LEAST_US + 2 * (KERNEL_US - LEAST_US))
    assert kernel(trace, ops, wider, "ampere")[1] >= KERNEL_US


def test_casts_that_were_recorded_are_gone_in_single_precision_and_other_copies_are_not(tmp_path: Path) -> None:
    cast, copy = (
        "vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda>",
        "elementwise_kernel<direct_copy_kernel<c10::BFloat16> >",
    )
    half = ("aten::addmm", "ampere_bf16_s16816gemm_bf16_128x64", LINEAR[2])
    trace = profiled(tmp_path, [("aten::copy_", cast, [[9]]), half, ("aten::copy_", copy, [[9]])], dtype="c10::BFloat16")
    ops, change = changed(trace, "fp32")
    assert kernel(trace, ops, change, "vectorized") == [LEAST_US, LEAST_US, KERNEL_US]
    assert kernel(trace, ops, change, "elementwise")[0] > 1.9 * KERNEL_US


def test_fp8_is_for_products_whose_sides_are_multiples_of_16(tmp_path: Path) -> None:
    trace = profiled(tmp_path, [LINEAR, ODD])
    ops, change = changed(trace, "fp8", "h100")
    first, second = (kernel(trace, ops, change, SGEMM, place)[0] for place in range(2))
    ops, half = changed(trace, "bf16", "h100")
    assert first != kernel(trace, ops, half, SGEMM, 0)[0]
    assert second == kernel(trace, ops, half, SGEMM, 1)[0]
    assert any("are 4 kernels a step and rank" in sentence for sentence in change.assumed)
    more_us = change.added_us[0] - half.added_us[0]
    assert more_us[ops.on_device].sum() > 0
    assert more_us[~ops.on_device].sum() > 0


@every_case("precision", ["bf16", "fp8"])
def test_without_shapes_the_interval_holds_peaks_and_bytes(precision: str, tmp_path: Path) -> None:
    trace = profiled(tmp_path, [LINEAR], shapes=False)
    ops, change = changed(trace, precision, "h100")
    middle, low, high = kernel(trace, ops, change, SGEMM)
    assert low < middle / 1.5 < high / 3
    assert any("without recorded shapes (100 %" in sentence for sentence in change.assumed)


def test_a_kernel_that_may_be_in_two_precisions_has_an_interval_for_both(tmp_path: Path) -> None:
    trace = profiled(tmp_path, [("aten::addmm", "some_gemm", [[4096], [4096, 4096], [4096, 4096]])])
    ops, change = changed(trace, "bf16")
    single, _ = (changed(profiled(tmp_path, [("aten::addmm", name, LINEAR[2])]), "bf16") for name in (SGEMM, "s1688gemm"))
    assert kernel(trace, ops, change, "some_gemm")[2] > 2.5 * kernel(trace, ops, change, "some_gemm")[0]
    assert single[1].assumed[0] != change.assumed[0]
    assert change.assumed[0].startswith("products were recorded in fp32 or tf32 (100 %)")
