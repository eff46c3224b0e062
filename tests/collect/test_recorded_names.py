"""How libraries spell collectives and element types, and what is made of it."""

import pytest

from dpro_search.collect.recorded_names import collective_kind_of, copies_of_gathers, dtype_of, role_in_mxnet, role_in_server
from dpro_search.collect.trace import CollectiveKind, Role
from tests.every_case import every_case

SPELLINGS = {
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": CollectiveKind.ALL_REDUCE,
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": CollectiveKind.REDUCE_SCATTER,
    "ncclDevKernel_AllGather_RING_LL": CollectiveKind.ALL_GATHER,
    "ncclDevKernel_SendRecv": CollectiveKind.UNKNOWN,  # also carries out all-to-alls
    "nccl:all_to_all": CollectiveKind.ALL_TO_ALL,
    "nccl:send 0->1": CollectiveKind.SEND,
    "nccl:recv 0<-1": CollectiveKind.RECV,
    "nccl:coalesced": CollectiveKind.UNKNOWN,
    "_allgather_base": CollectiveKind.ALL_GATHER,
    "reduce_scatter_tensor_coalesced": CollectiveKind.REDUCE_SCATTER,
    "allreduce": CollectiveKind.ALL_REDUCE,
    "broadcast": CollectiveKind.BROADCAST,
    "barrier": CollectiveKind.BARRIER,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
    "all-reduce.17": CollectiveKind.ALL_REDUCE,
    "collective-permute-start.1": CollectiveKind.UNKNOWN,
    "HorovodAllreduce": CollectiveKind.ALL_REDUCE,
    "params-all-gather": CollectiveKind.ALL_GATHER,
    "optimizer-clip-main-grad": CollectiveKind.UNKNOWN,
    "KVStoreDistDefaultStoragePushPull": CollectiveKind.UNKNOWN,  # two messages
    "": CollectiveKind.UNKNOWN,
}


@every_case(("name", "kind"), SPELLINGS.items())
def test_collectives(name, kind):
    assert collective_kind_of(name) is kind


@every_case(
    ("name", "dtype"),
    [
        ("Float", "float32"), ("float", "float32"), ("c10::BFloat16", "bfloat16"), ("Half", "float16"), ("long int", "int64"),
        ("Long", "int64"), ("unsigned char", "uint8"), ("Float8_e4m3fn", "float8_e4m3fn"), ("float32", "float32"),
        ("Scalar", ""), ("TensorList", ""), ("", ""),
    ],
)  # fmt: skip
def test_element_types(name, dtype):
    assert dtype_of(name) == dtype


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("stage1_conv0_fwd", Role.FORWARD), ("stage1_conv0_fwd backward", Role.BACKWARD), ("_backward_Convolution", Role.BACKWARD),
        ("multi_sgd_mom_update", Role.UPDATE), ("CopyCPU2CPU", Role.COPY),
    ],
)  # fmt: skip
def test_roles_of_operators_of_mxnet(name, role):
    assert role_in_mxnet(name) is role


@pytest.mark.parametrize(
    ("name", "role"),
    [("CopyCPU2CPU", Role.COPY), ("COPY_MERGED", Role.COPY), ("sgd_update", Role.UPDATE), ("_plus", Role.UNKNOWN)],
)
def test_roles_of_operations_of_servers(name, role):
    assert role_in_server(name) is role


def test_copies_belong_to_the_gathers_of_their_unit_in_order():
    ops = [
        "FSDP::all_gather (block)/fsdp::all_gather_copy_in",
        "FSDP::all_gather/fsdp::all_gather_copy_in",
        "aten::mm",
        "FSDP::all_gather_copy_out (block)/fsdp::split_with_sizes_copy",
        "FSDP::all_gather_copy_out/fsdp::split_with_sizes_copy",
        "FSDP::all_gather (block)/fsdp::all_gather_copy_in",
        "FSDP::all_gather_copy_out (block)/fsdp::split_with_sizes_copy",
    ]
    assert sorted(copies_of_gathers(["block", "", None, "block"], ops)) == [(0, 0), (0, 3), (1, 1), (1, 4), (3, 5), (3, 6)]


def test_a_unit_whose_copies_are_not_as_many_as_its_gathers_has_none():
    assert copies_of_gathers(["block", "block"], ["FSDP::all_gather (block)/fsdp::all_gather_copy_in"]) == []
