"""Raw files of a job with parameter servers -> its trace; whatever they hold, one clear line or a trace."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mxnet_profiles import EPOCH, ROUNDS, STEP_US, layered, server, worker

from dpro_search.collect.assemble.kvstore import assemble_kvstore
from dpro_search.collect.trace import EventKind
from dpro_search.errors import DproSearchError, InputError

NAMES = sorted(ROUNDS)
FUZZED = ("job.json", "rank0/hook.json", "rank1/worker.json", "rank0/symbol.json", "server0/cpu.json", "server0/rank0_server.json")


def raw(folder: Path, *, second_machine: str = "here") -> Path:
    """Two workers and a server, two profiled steps and two without the profiler."""
    for name in ("rank0", "rank1", "server0"):
        (folder / name).mkdir(parents=True)
    begin = [(EPOCH + STEP_US * step) * 1000 for step in range(4)]
    parameters = [
        {"key": key, "name": name, "dtype": "float32", "shape": [64], "size_bytes": 256, "trained": True}
        for key, name in enumerate(NAMES)
    ]
    for rank in range(2):
        worker(folder / f"rank{rank}" / "worker.json", late_us=50 * rank, marked=False)
        layered(folder / f"rank{rank}" / "symbol.json")
        hook = {
            "rank": rank,
            "host": f"h{rank}",
            "machine": "here" if rank == 0 else second_machine,
            "cores": [rank],
            "steps": [[ns, ns + 9_000_000, i * 8_000_000, i * 1_000_000, i < 2] for i, ns in enumerate(begin)],
            "peak_rss_bytes": 1,
            "versions": {"mxnet": "1.9.1"},
            "kvstore": {"type": "dist_sync", "update_on_kvstore": True, "parameters": parameters},
        }
        (folder / f"rank{rank}" / "hook.json").write_text(json.dumps(hook))
    server(folder / "server0" / "rank0_server.json")
    (folder / "server0" / "cpu.json").write_text(json.dumps([[ns, i * 2_000_000] for i, ns in enumerate(begin)]))
    job = {
        "format": "mxnet-kvstore",
        "ranks": 2,
        "servers": 1,
        "server_hosts": ["h2"],
        "server_cores": [0],
        "command": ["python", "train.py"],
        "machine": "a machine",
        "boot": "here",
        "recorded_at": "2026-01-01T00:00:00+00:00",
        "knobs": {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000000"},
    }
    (folder / "job.json").write_text(json.dumps(job))
    return folder


def test_workers_and_servers_are_ranks_with_their_work(tmp_path):
    trace = assemble_kvstore(raw(tmp_path / "raw"))
    assert (trace.meta.ranks, trace.meta.hosts, trace.meta.cores) == (3, ("h0", "h1", "h2"), (0, 1, 0))
    assert {tensor.name: tensor.node for tensor in trace.tensors} == {name: f"key{key}" for key, name in enumerate(NAMES)}
    assert len(np.unique(trace.events.step[trace.events.kind == EventKind.COMM])) == 2
    assert (trace.events.rank[trace.events.kind == EventKind.SERVER] == 2).all()


def test_processes_of_one_machine_share_its_clock(tmp_path):
    clock = assemble_kvstore(raw(tmp_path / "raw")).meta.clock
    assert clock.offset_us == (0.0, 0.0, 0.0)
    assert "one machine" in clock.method


def test_clocks_of_several_machines_are_estimated_from_the_gradients(tmp_path):
    clock = assemble_kvstore(raw(tmp_path / "raw", second_machine="there")).meta.clock
    assert "one machine" not in clock.method
    assert clock.residual_us[1] > 0
    assert clock.offset_us[2] == clock.offset_us[0]  # the server is on the first worker's machine


def test_servers_are_in_the_order_of_the_stores_numbers(tmp_path):
    folder = raw(tmp_path / "raw")
    job = json.loads((folder / "job.json").read_text()) | {"servers": 2, "server_hosts": ["h2", "h3"], "server_cores": [0, 1]}
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "server0" / "rank0_server.json").rename(folder / "server0" / "rank1_server.json")
    (folder / "server1").mkdir()
    server(folder / "server1" / "rank0_server.json")
    (folder / "server1" / "cpu.json").write_text((folder / "server0" / "cpu.json").read_text())
    assert assemble_kvstore(folder).meta.hosts == ("h0", "h1", "h3", "h2")


def test_a_missing_worker_is_named(tmp_path):
    folder = raw(tmp_path / "raw")
    (folder / "rank1" / "hook.json").unlink()
    with pytest.raises(InputError, match=r"rank1.hook.json: missing"):
        assemble_kvstore(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FUZZED), how=st.sampled_from(("cut", "flip", "type", "empty")), seed=st.integers(0, 2**32 - 1))
def test_damaged_files_give_a_trace_or_an_error_for_people(tmp_path_factory, name, how, seed):
    folder = raw(tmp_path_factory.mktemp("fuzz") / "raw")
    path = folder / name
    path.write_bytes(_damaged(path.read_bytes(), how, np.random.default_rng(seed)))
    with contextlib.suppress(DproSearchError):
        assemble_kvstore(folder)


def _damaged(data: bytes, how: str, rng: np.random.Generator) -> bytes:
    if how == "empty":
        return b""
    if how == "cut":
        return data[: int(rng.integers(len(data)))]
    if how == "flip":
        changed = bytearray(data)
        for place in rng.integers(len(data), size=3):
            changed[place] = int(rng.integers(256))
        return bytes(changed)
    value = json.loads(data)
    wrong = (None, -1, "x", [], {}, 1e300, True)[int(rng.integers(7))]
    if isinstance(value, dict) and value:
        value[list(value)[int(rng.integers(len(value)))]] = wrong
    elif isinstance(value, list) and value:
        value[int(rng.integers(len(value)))] = wrong
    return json.dumps(value).encode()
