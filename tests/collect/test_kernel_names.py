"""Names of kernels as people read them; the long ones are from real traces."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from dpro_search.graph import event_names as kernel_names
from dpro_search.graph.event_names import short_names
from tests.every_case import every_case

COPY = "at::native::(anonymous namespace)::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}::operator()() const"
ELEMENTWISE = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<%s>(at::TensorIteratorBase&)::{lambda(int)#1}>(int)"
)
MULTIPLY = "void at::native::vectorized_elementwise_kernel<4, at::native::%sFunctor<float, at::native::MulFunctor<float> > >(int)"


def test_the_example_in_the_module_runs():
    assert doctest.testmod(kernel_names).failed == 0


@every_case(
    ("name", "short"),
    [
        (f"launch of {ELEMENTWISE % COPY}@3", "launch of elementwise_kernel<direct_copy_kernel_cuda>@3"),
        (MULTIPLY % "AUnary", "vectorized_elementwise_kernel<MulFunctor>"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_nt>(cutlass_80_tensorop_s1688gemm_64x64_nt::Params)",
         "cutlass_80_tensorop_s1688gemm_64x64_nt"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(int)", "gemvx::kernel"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)@0 10 % faster",
         "ncclKernel_AllReduce_RING_LL_Sum_float@0 10 % faster"),
        ("Memcpy HtoD (Pinned -> Device)@3", "Memcpy HtoD (Pinned -> Device)@3"),
        ("communication=0", "communication=0"),
        ("volta_sgemm_128x32_nn", "volta_sgemm_128x32_nn"),
    ],
)  # fmt: skip
def test_a_name_keeps_what_runs(name, short):
    assert short_names([name]) == [short]


def test_names_that_differ_in_a_template_argument_show_it():
    names = [f"void at::native::CatArrayBatchedCopy<float, {dims}, 128, 1>(float*, int)" for dims in (2, 3)]
    assert short_names([*names, names[0]]) == ["CatArrayBatchedCopy<2>", "CatArrayBatchedCopy<3>", "CatArrayBatchedCopy<2>"]
    assert short_names([MULTIPLY % "AUnary", MULTIPLY % "BUnary"]) == [
        "vectorized_elementwise_kernel<MulFunctor, AUnaryFunctor>",
        "vectorized_elementwise_kernel<MulFunctor, BUnaryFunctor>",
    ]


def test_names_that_differ_in_their_parameters_only_are_numbered():
    assert short_names(["f(int)", "f(float)"]) == ["f (variant 1)", "f (variant 2)"]


@given(st.lists(st.text("ab<>(){},:@ ->", max_size=40), unique=True))
def test_any_names_stay_different(names):
    short = short_names(names)
    assert len(set(short)) == len(names)


def test_a_name_without_end_takes_no_time():
    assert len(short_names(["a<" * 500_000])[0]) <= 120
