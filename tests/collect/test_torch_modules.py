"""Modules of a recorded DistributedDataParallel job: a real two-rank recording of three blocks with normalisation and dropout."""

import contextlib
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.torch.host_spans import read_host_spans
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.trace import Trace
from dpro_search.errors import DproSearchError
from tests.recordings import DATA, trace_of

RECORDING = "ddp_blocks"
RAW = DATA / RECORDING
BATCH, WIDTH, FLOAT = 16, 64, 4


def renamed(path: Path, old: str, new: str) -> None:
    """Give marks of a profile another name."""
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(old.encode(), new.encode())))


def test_the_blocks_are_known_in_the_order_in_which_they_run(trace):
    assert [(module.name, module.type, module.member) for module in trace.modules] == [
        (str(i), "Sequential", True) for i in range(3)
    ]
    assert {module.refusal for module in trace.modules} == {""}


def test_every_block_ran_once_in_every_profiled_step_of_every_rank(trace):
    calls = trace.module_calls
    steps = set(trace.steps.index[trace.steps.traced].tolist())
    rows = sorted(zip(calls.module.tolist(), calls.rank.tolist(), calls.step.tolist(), strict=True))
    assert rows == [(module, rank, step) for module in range(3) for rank in range(2) for step in sorted(steps)]


def test_the_backward_pass_meets_the_blocks_in_the_other_order(trace):
    calls = trace.module_calls
    for step in set(calls.step.tolist()):
        indices = np.flatnonzero((calls.rank == 1) & (calls.step == step))
        indices = indices[np.argsort(calls.module[indices])]
        assert (calls.start_us[indices] < calls.again_us[indices]).all()
        assert (calls.again_us[indices][:-1] < calls.start_us[indices][1:]).all()
        assert (np.diff(calls.backward_us[indices]) < 0).all()
        assert calls.again_us[indices][-1] < calls.backward_us[indices][-1]


def test_a_last_layer_whose_result_no_backward_function_needs_does_not_run_again(trace):
    spans = read_host_spans(RAW / "rank0" / "kineto.json.gz")
    marked_us = np.median((spans.end_us - spans.start_us)[spans.named("dpro_search.module 1")])
    calls = trace.module_calls
    again_us = np.median((calls.again_us - calls.start_us)[(calls.module == 1) & (calls.rank == 0)])
    addmm_us = np.median((spans.end_us - spans.start_us)[spans.named("aten::addmm")])
    assert 0 < again_us < marked_us - addmm_us / 2


def test_what_a_block_frees_is_what_only_its_own_backward_pass_reads(trace):
    # Results of its first layer, activation and dropout, the dropout's mask, and mean and deviation of each feature; its own result
    # is the next block's input.
    assert {module.frees_bytes for module in trace.modules} == {4 * BATCH * WIDTH * FLOAT + 2 * WIDTH * FLOAT}
    behind = [module.behind_bytes for module in trace.modules]
    held_bytes = trace.modules[0].frees_bytes + BATCH * WIDTH * FLOAT
    np.testing.assert_allclose([behind[0] - behind[1], behind[1] - behind[2]], held_bytes, rtol=0.02)


def test_names_of_ops_say_nothing_of_modules(trace):
    assert not [name for name in trace.names if "module" in name]
    assert "DistributedDataParallel.forward/aten::linear" in trace.names


def test_they_are_saved_and_read_again(trace, tmp_path):
    trace.save(tmp_path / "t")
    again = Trace.load(tmp_path / "t")
    assert again.modules == trace.modules
    np.testing.assert_array_equal(again.module_calls.module, trace.module_calls.module)
    np.testing.assert_allclose(again.module_calls.backward_us, trace.module_calls.backward_us, atol=0.006)


def test_a_recording_from_before_they_were_kept_has_none():
    old = trace_of("ddp_mlp")
    assert old.modules == ()
    assert len(old.module_calls) == 0


def test_a_module_that_runs_twice_in_a_step_or_never_says_so(raw):
    renamed(raw / "rank1" / "kineto.json.gz", "dpro_search.module 1", "dpro_search.module 0")
    trace = assemble_torch(raw)
    refusals = {module.name: module.refusal for module in trace.modules}
    assert refusals == {"0": "it runs 2 times in a step", "1": "no backward function of it was seen in the recorded steps", "2": ""}
    assert {trace.modules[module].name for module in trace.module_calls.module} == {"2"}


def test_without_an_execution_trace_nothing_is_known_of_memory(raw):
    for rank in range(2):
        (raw / f"rank{rank}" / "execution.json.gz").unlink()
    assert {(module.frees_bytes, module.behind_bytes) for module in assemble_torch(raw).modules} == {(-1, -1)}


@settings(deadline=None, max_examples=15)
@given(st.lists(st.one_of(st.none(), st.just({}), st.fixed_dictionaries({"name": st.sampled_from(["0", "", "x"]), "type": st.text(
    max_size=3), "member": st.booleans()})), max_size=4), st.integers(0, 1))  # fmt: skip
def test_a_list_of_other_modules_never_crashes_the_assembly(tmp_path_factory, modules, rank):
    raw = shutil.copytree(RAW, tmp_path_factory.mktemp("modules") / "raw")
    path = raw / f"rank{rank}" / "hook.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules": modules}))
    with contextlib.suppress(DproSearchError):
        assert len(assemble_torch(raw).events)
