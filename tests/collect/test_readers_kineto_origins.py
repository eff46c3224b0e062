"""Which op of the framework, which module and which line of the user's code the events of a Kineto profile come from."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from importer_kit import shared_trace
from kineto_files import AUTOGRAD, START, Profile

from dpro_search.collect.readers.kineto.columns import tells_where
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import EventKind, Trace
from tests.every_case import every_case

RECORDED = Path(__file__).parents[1] / "data" / "kineto_modules" / "net.json.gz"


def origin(trace: Trace, event: int) -> tuple[str, str, str]:
    columns = (trace.events.op, trace.events.module, trace.events.source)
    return tuple(trace.names[column[event]] if column[event] >= 0 else "" for column in columns)


def origins_of(trace: Trace, name: str) -> set[tuple[str, str, str]]:
    return {origin(trace, event) for event in np.flatnonzero(trace.events.name == trace.names.index(name)).tolist()}


def training(**forward_args) -> Profile:
    """A forward pass in two modules, and the backward pass of the inner one on another thread."""
    profile = Profile()
    profile.step(0, START, 900)
    profile.frame("train.py(9): <module>", START + 1, 850)
    profile.frame("nn.Module: Net_0", START + 5, 200)
    profile.frame("torch/nn/modules/module.py(1782): _call_impl", START + 6, 198)
    profile.frame("nn.Module: Linear_3", START + 10, 100)
    profile.frame("net.py(4): forward", START + 12, 90)
    profile.op("aten::linear", START + 15, 60, **{"Sequence number": 7, "Fwd thread id": 0, **forward_args})
    profile.op("aten::addmm", START + 20, 50, **{"Sequence number": 7, "Fwd thread id": 0})
    profile.kernel("gemm", START + 60, 40, launched=START + 25)
    profile.op("aten::relu", START + 150, 30, **{"Sequence number": 8, "Fwd thread id": 0})
    profile.kernel("relu", START + 170, 40, launched=START + 155)
    backward = {"Sequence number": 7, "Fwd thread id": 1}
    profile.op("autograd::engine::evaluate_function: AddmmBackward0", START + 400, 80, AUTOGRAD, **backward)
    profile.op("AddmmBackward0", START + 405, 70, AUTOGRAD, **backward)
    profile.op("aten::mm", START + 410, 50, AUTOGRAD)
    profile.kernel("gemm_backward", START + 450, 40, launched=START + 415, tid=AUTOGRAD)
    profile.kernel("alone", START + 700, 40)
    return profile


def test_a_kernel_has_the_op_that_launched_it_its_modules_and_the_line_of_the_users_code(tmp_path):
    trace = read([training().write(tmp_path / "trace.json")])
    assert origins_of(trace, "gemm") == {("aten::addmm", "Net_0.Linear_3", "net.py(4): forward")}
    assert origins_of(trace, "relu") == {("aten::relu", "Net_0", "train.py(9): <module>")}


def test_a_kernel_of_the_backward_pass_is_of_the_module_whose_op_it_differentiates(tmp_path):
    trace = read([training().write(tmp_path / "trace.json")])
    assert origins_of(trace, "gemm_backward") == {("aten::mm", "Net_0.Linear_3", "net.py(4): forward")}


def test_what_has_no_known_launch_has_the_op_of_its_external_id_or_none(tmp_path):
    profile = training(**{"External id": 77})
    trace = read([profile.write(tmp_path / "trace.json")])
    assert origins_of(trace, "alone") == {("", "", "")}
    profile.records[-1]["args"]["External id"] = 77
    assert origins_of(read([profile.write(tmp_path / "again.json")]), "alone") == {
        ("aten::linear", "Net_0.Linear_3", "net.py(4): forward")
    }


@every_case(
    ("name", "expected"),
    [
        ("nn.Module: Conv2d_0", True),
        ("train.py(23): forward", True),
        ("megatron/core/model.py(7): forward", True),
        ("torch/nn/modules/module.py(1782): _call_impl", False),
        ("/usr/lib/python3.11/site-packages/apex/x.py(3): f", False),
        ("typing.py(359): inner", False),
        ("<built-in function len>", False),
        ("<frozen os>(674): __getitem__", False),
    ],
)
def test_frames_of_the_users_own_files_are_kept(name, expected):
    assert tells_where(name) is expected


def test_recorded_modules_of_a_model(tmp_path):
    """Each of both blocks has the same ops, forward and backward."""
    trace = read([RECORDED])
    counts = Counter(origin(trace, event)[1:] for event in range(len(trace.events)) if trace.events.kind[event] == EventKind.OP)
    assert {module for module, _ in counts} - {""} == {
        "Net_0", "Net_0.Linear_0",
        *(f"Net_0.Block_{i}{inner}" for i in (0, 1) for inner in ("", f".Conv2d_{i}", f".BatchNorm2d_{i}")),
    }  # fmt: skip
    backward = trace.names.index("ConvolutionBackward0")
    modules = Counter(origin(trace, event)[1] for event in np.flatnonzero(trace.events.name == backward).tolist())
    assert modules == {"Net_0.Block_0.Conv2d_0": 2, "Net_0.Block_1.Conv2d_1": 2}
    assert {source for _, source in counts} == {"", "rec.py(14): forward", "rec.py(24): forward", "rec.py(38): <module>"}
    trace.save(tmp_path / "T")
    again = Trace.load(tmp_path / "T")
    np.testing.assert_array_equal(again.events.module, trace.events.module)
    np.testing.assert_array_equal(again.memory.allocated_bytes, trace.memory.allocated_bytes)


def test_recorded_memory_is_kept():
    trace = read([RECORDED])
    assert len(trace.memory) > 200
    assert 0 < trace.memory.allocated_bytes.max() < 1 << 20


@pytest.mark.parametrize(
    ("profile", "least"),
    [("ddp_resnet50_a100_rank0of2", 1.0), ("torchrec_a100_rank3of8", 0.99), ("convnet_v100_ns_timestamps", 1.0)],
)
def test_real_kernels_have_the_op_that_launched_them(profile, least):
    trace = shared_trace(f"kineto_single/{profile}.json.gz")
    kernels = trace.events.op[trace.events.kind == EventKind.KERNEL]
    assert (kernels >= 0).mean() >= least
    assert trace.meta.device
