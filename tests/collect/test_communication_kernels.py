"""Communication is recognised whatever library carries it out, and what is not known is said."""

import json

import pytest
from kineto_files import COLLECTIVES, START, Profile

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.recorded_names import communicates, computes_too, library_of
from dpro_search.collect.trace import EventKind, Trace
from tests.every_case import every_case
from tests.in_process import succeeds
from tests.profiles import profiled, times_of

KNOWN = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "mscclKernel_Sum_half_LL",
    "mscclpp::collective::allreducePacket(void*)",
    "oneccl_allreduce_small",
    "hcom_allReduce__123_0",
    "void deep_ep::internode::dispatch<false, 8, false, 8>(int4*, float*)",
    "void deep_ep::internode_ll::combine<true, 7168>(void*)",
    "hybrid_ep::dispatch_kernel<8>(int)",
    "nvshmemi_proxy_rma_kernel",
    "nvshmemi_barrier_on_stream_kernel",
    "void c10d::symmetric_memory::(anonymous namespace)::multimem_all_reduce_kernel<__nv_bfloat16, 16>(int)",
    "void two_shot_all_reduce_kernel_inplace<float, 8>(float*)",
    "void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*)",
    "void sglang::cross_device_reduce_1stage<float, 8>(float*)",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true>(void*)",
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int)",
    "Memcpy PtoP (Device -> Device)",
    "MemcpyP2P",
)
COMPUTE = (
    "sm90_xmma_gemm_bf16",
    "void deep_ep::layout::get_dispatch_layout<256, 4, 2>(long const*)",
    "void softmax_forward<float, WarpAllReduce<MaxOp>>(float*)",
    "void at::native::reduce_kernel<512, 1>(int)",
    "scatter_reduce_kernel",
    "broadcast_multiply_fusion",
    "triton_poi_fused_all_gather_into_tensor_cat_0",
    "Memcpy DtoD (Device -> Device)",
)


def job(tmp_path, kernel: str, op: str = "c10d::allreduce_") -> Trace:
    """Steps of 1000 us: a product of 300 us, then 400 us of a kernel on another stream beside a product of 200 us, then the update,
    which waits for it. The host waits for the end."""
    profile = Profile()
    for number in range(5):
        begin = START + 1000 * number
        profile.step(number, begin - 20, 990)
        profile.kernel("sm90_xmma_gemm", begin, 300, launched=begin - 15)
        profile.call("cudaStreamWaitEvent", begin - 9, 1)
        profile.op(op, begin - 8, 6)
        profile.kernel(kernel, begin + 302, 400, launched=begin - 7, stream=COLLECTIVES, call_us=3.0)
        profile.kernel("sm90_xmma_gemm", begin + 302, 200, launched=begin - 1)
        profile.call("cudaStreamWaitEvent", begin + 4, 1)
        profile.kernel("adam", begin + 704, 276, launched=begin + 6)
        profile.call("cudaDeviceSynchronize", begin + 12, 970)
    return read([profile.write(tmp_path / "rank0.json")])


@every_case("kernel", KNOWN)
def test_kernels_of_communication_libraries_are_known(kernel):
    assert communicates(kernel)


@every_case("kernel", COMPUTE)
def test_kernels_that_compute_do_not_communicate(kernel):
    assert not communicates(kernel)
    assert not computes_too(kernel)


@every_case("kernel", KNOWN)
def test_communication_of_any_library_is_exposed_and_can_be_taken_away(tmp_path, kernel):
    of_kernel = profiled(job(tmp_path, kernel))
    assert times_of(of_kernel).breakdown_us["exposed_communication"] == pytest.approx(200, abs=5)
    assert times_of(of_kernel, "communication=0").iteration_us == pytest.approx(800, abs=10)


def test_a_kernel_with_the_name_of_a_collective_in_an_op_of_communication_communicates(tmp_path):
    trace = job(tmp_path, "my_all_reduce_kernel(float*)")
    assert (trace.events.kind == EventKind.COLLECTIVE).sum() == 5


def test_a_kernel_of_a_collective_that_nobody_knows_is_unknown_and_is_named(tmp_path):
    trace = job(tmp_path, "ring_step_kernel(float*)")
    assert times_of(profiled(trace)).breakdown_us["unknown"] == pytest.approx(200, abs=5)
    low_us, high_us = times_of(profiled(trace), "communication=0").interval_us
    assert low_us < 800 < 1000 < high_us
    trace.save(tmp_path / "T")
    assert "ring_step_kernel" in json.loads(succeeds("diagnose", tmp_path / "T", "--json"))["warnings"][0]
    assert "ring_step_kernel" in succeeds("replay", tmp_path / "T")


@pytest.mark.parametrize(
    ("op", "unknown"), [("_C_custom_ar::all_reduce", 5), ("aten::all_reduce_like", 0), ("fsdp::all_gather_copy_in", 0)]
)
def test_an_op_with_the_name_of_a_collective_is_one_of_communication(tmp_path, op, unknown):
    trace = job(tmp_path, "ring_step_kernel(float*)", op=op)
    assert (trace.events.kind == EventKind.UNKNOWN).sum() == unknown


def test_what_an_op_of_communication_copies_or_computes_stays_what_it_is(tmp_path):
    trace = job(tmp_path, "void at::native::vectorized_elementwise_kernel<4>(int)")
    assert not (trace.events.kind == EventKind.UNKNOWN).any()


@pytest.mark.parametrize("kernel", ["allreduce_fusion_kernel_oneshot_lamport<8>(x)", "flux_gemm_reduce_scatter_kernel"])
def test_kernels_that_compute_and_communicate_in_one_are_unknown(tmp_path, kernel):
    trace = job(tmp_path, kernel, op="vllm::all_reduce_norm")
    assert (trace.events.kind == EventKind.UNKNOWN).sum() == 5
    assert any("compute and communicate in one" in text for text in trace.meta.warnings)


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nccl"),
        ("void deep_ep::intranode::dispatch<8, 768>(int4*)", "deep_ep"),
        ("gloo:all_reduce", "gloo"),
        ("void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*)", ""),
    ],
)
def test_a_trace_names_the_library_that_communicates_and_no_other(name, library):
    assert library_of(name) == library
