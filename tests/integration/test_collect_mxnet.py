"""Recording real jobs of MXNet with parameter servers, without a line added to their scripts."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.assemble.kvstore import assemble_kvstore
from dpro_search.collect.launch import parameter_servers
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import MXNET_KVSTORE
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError, JobError, TraceFormatError
from dpro_search.kinds import recorded_job
from dpro_search.replay import replay
from dpro_search.space.servers.kvstore_job import kvstore_graph, process_loads
from dpro_search.space.servers.kvstore_recorded import recorded_kvstore_job
from dpro_search.space.servers.placement import hosts_of_workers
from tests.faults.processes import dpro

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("kvstore_job.py")
SCHEDULE = StepSchedule(warmup=3, untraced=4, traced=3)
TENSORS = 12


def spec(python: str, *how: object, **env: str) -> JobSpec:
    return JobSpec(command=(python, str(JOB), *map(str, how)), ranks=2, cores=default_cores(2), env=env, timeout_s=60)


@pytest.fixture(scope="module")
def recorded(mxnet_python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("recorded")
    rate = ("--rate", "2gbit") if os.geteuid() == 0 else ()
    when = ("--warmup", "3", "--untraced", "4", "--traced", "3")
    command = ["collect", "--framework", "mxnet", "--comm", "kvstore", "--out", folder / "trace", "--keep-raw", folder / "raw"]
    done = dpro(*command, *rate, *when, "--json", "--", mxnet_python, JOB, "plain", timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_recording_says_what_it_holds(recorded):
    folder, result = recorded
    assert result["trace"] == str(folder / "trace")
    assert (result["ranks"], result["steps"], result["tensors"]) == (4, 3, TENSORS)  # 2 workers, 2 servers
    assert result["measured_iteration_us"] > 0


def test_every_gradient_of_every_worker_and_step_is_known_by_name_key_and_size(recorded):
    trace = Trace.load(recorded[0] / "trace")
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    for rank in (0, 1):
        for step in (7, 8, 9):
            assert sorted(comm.tensor[(comm.rank == rank) & (comm.step == step)]) == list(range(TENSORS))
    sizes = {tensor.name.rpartition("_")[0]: tensor.size_bytes for tensor in trace.tensors if tensor.name.endswith("weight")}
    assert sizes.pop("dense0") == 4 * 96 * 32
    assert sizes.pop("dense1") == 4 * 10 * 96
    assert set(sizes.values()) == {4 * 96 * 96}
    assert all(tensor.node.startswith("key") for tensor in trace.tensors)


def test_the_servers_are_ranks_of_their_own_with_their_work_and_cpu_time(recorded):
    trace = Trace.load(recorded[0] / "trace")
    served = trace.events.select(trace.events.kind == EventKind.SERVER)
    assert set(served.rank.tolist()) == {2, 3}
    updates = np.array(["_update" in name for name in trace.names])[served.name]
    assert updates.sum() == TENSORS * 3
    assert trace.steps.compute_cpu_us[trace.steps.rank >= 2].sum() > 0


def test_operators_of_branches_are_matched_to_the_network(recorded):
    trace = Trace.load(recorded[0] / "trace")
    named = {trace.names[name] for name in trace.events.name[(trace.events.rank == 0) & (trace.events.kind != EventKind.COMM)]}
    layers = [name for graph in trace.graphs[:1] for name, op in zip(graph.name, graph.op, strict=True) if op == "FullyConnected"]
    assert len(layers) == 6
    assert {f"{layer} backward" for layer in layers} | set(layers) <= named


def test_raw_files_give_the_same_trace_again(recorded):
    again, trace = assemble_kvstore(recorded[0] / "raw"), Trace.load(recorded[0] / "trace")
    np.testing.assert_allclose(again.events.start_us, trace.events.start_us, atol=0.01)


def test_the_recorded_job_can_be_replayed(recorded):
    job = recorded_kvstore_job(Trace.load(recorded[0] / "trace"))
    assert len(job.workers) == len(job.server_core) == 2
    made = [tensor for segment in job.workers[0] for tensor in segment.makes]
    used = [tensor for segment in job.workers[0] for tensor in segment.uses]
    assert sorted(made) == sorted(used) == list(range(TENSORS))
    assert replay(kvstore_graph(job)).iteration_us > 0


@pytest.mark.parametrize(
    "verb",
    [("replay", "--set", "servers=1"), ("replay", "--set", "p3=1"), ("replay",), ("diagnose",)],
)
def test_the_verbs_know_such_a_trace(recorded, verb):
    done = dpro(verb[0], recorded[0] / "trace", *verb[1:], "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    iteration_us = result["iteration_us" if verb[0] == "diagnose" else "predicted_iteration_us"]
    assert sum(result["breakdown_us"].values()) == pytest.approx(iteration_us)
    if verb[0] == "diagnose":
        assert [row["role"] for row in result["ranks"]] == ["worker", "worker", "server", "server"]
        assert sum(row["share_pct"] for row in result["servers"]) == pytest.approx(100)
        assert isinstance(result["findings"], list)


def test_networks_that_are_not_hybridized_are_recorded_alike(mxnet_python, tmp_path):
    trace = MXNET_KVSTORE.record(spec(mxnet_python, "imperative"), tmp_path / "t", schedule=SCHEDULE)
    assert len(trace.tensors) == TENSORS
    assert all(tensor.size_bytes for tensor in trace.tensors)


def test_the_recorder_changes_no_number(mxnet_python, recorded):
    logs = sorted((recorded[0] / "raw").glob("rank*/log"))
    root = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "19517", "DMLC_NUM_SERVER": "2", "DMLC_NUM_WORKER": "2"}
    env = {**os.environ, **root, "DMLC_INTERFACE": "lo", "DMLC_NODE_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    roles = {"scheduler": ["-c", "import mxnet"], "server": ["-c", "import mxnet"], "worker": [str(JOB), "plain"]}
    started = [
        subprocess.Popen([mxnet_python, *roles[role]], env={**env, "DMLC_ROLE": role}, stdout=subprocess.PIPE, text=True)
        for role in ("scheduler", "server", "server", "worker", "worker")
    ]
    try:
        plain = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    # The workers have the same data, and so the same weights.
    (loss,) = {line for text in (*plain, *(log.read_text() for log in logs)) for line in text.splitlines() if "0x" in line}
    assert loss.startswith("loss")


def test_a_job_is_timed_without_the_profiler(mxnet_python):
    times = MXNET_KVSTORE.time(spec(mxnet_python, "plain", DMLC_NUM_SERVER="1"), warmup=3)
    assert len(times.iteration_us) == 10
    assert (times.comm_cpu_us > 0).any()


def test_a_server_without_a_key_is_reported(mxnet_python, tmp_path):
    many = spec(mxnet_python, "plain", DMLC_NUM_SERVER="3")
    trace = MXNET_KVSTORE.record(many, tmp_path / "t", schedule=SCHEDULE)
    servers = trace.meta.ranks - 2
    assert servers + sum("has no key" in warning for warning in trace.meta.warnings) == 3


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (("fails",), JobError, "the script failed on its own"),
        (("plain", 3), InputError, "only 3 steps ran"),
        (("local",), InputError, "use kvstore='dist_sync'"),
    ],
)
def test_jobs_that_cannot_be_recorded_say_why(mxnet_python, tmp_path, monkeypatch, how, kind, message):
    if how == ("local",):
        monkeypatch.setattr(parameter_servers, "_END_S", 1.0)  # servers that no worker used do not end
    with pytest.raises(kind, match=message):
        MXNET_KVSTORE.record(spec(mxnet_python, *how), tmp_path / "t", schedule=SCHEDULE)
    assert not (tmp_path / "t").exists()


def test_a_job_that_hangs_is_ended_with_its_servers(mxnet_python, tmp_path):
    raw = tmp_path / "raw"
    with pytest.raises(JobError, match=r"took longer than 15 s .* and was ended; last output of rank 0: begun"):
        MXNET_KVSTORE.record(replace(spec(mxnet_python, "hangs"), timeout_s=15), tmp_path / "t", schedule=SCHEDULE, keep_raw=raw)
    assert processes_in(raw) == []


def test_priority_slices_are_recorded_and_replayed(mxnet_python, tmp_path):
    knobs = {"DMLC_PS_VAN_TYPE": "p3", "MXNET_KVSTORE_SLICE_THRESHOLD": "1000"}
    trace = MXNET_KVSTORE.record(spec(mxnet_python, "p3", **knobs), tmp_path / "t", schedule=SCHEDULE)
    job = recorded_kvstore_job(trace)
    assert job.slicing.priority
    assert sorted(tensor for group in job.updates for tensor in group) == list(range(TENSORS))
    assert len(job.updates) < TENSORS  # several at once
    served = trace.events.select(trace.events.kind == EventKind.SERVER)
    sums = np.array([name == "BinaryOpKernel" for name in trace.names])[served.name]
    assert sums.sum() == 3 * sum(map(len, job.slices))
    assert replay(kvstore_graph(job)).iteration_us > 0


def test_a_network_of_two_inputs_is_known_by_its_graph(mxnet_python, tmp_path):
    trace = MXNET_KVSTORE.record(spec(mxnet_python, "two-inputs"), tmp_path / "t", schedule=SCHEDULE)
    assert [op for graph in trace.graphs[:1] for op in graph.op].count("FullyConnected") == 2
    assert all(tensor.size_bytes for tensor in trace.tensors)


def test_a_server_that_dies_is_one_line_and_leaves_nothing_behind(mxnet_python, tmp_path):
    raw = tmp_path / "raw"
    with pytest.raises(JobError, match=r"^server\d ended with code -9: ") as raised:
        MXNET_KVSTORE.record(spec(mxnet_python, "kills-a-server"), tmp_path / "t", schedule=SCHEDULE, keep_raw=raw)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "t").exists()
    assert processes_in(raw) == []


def processes_in(folder: Path) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cwd") if path.exists() and folder.resolve() in path.resolve().parents]


def test_a_number_of_servers_that_is_none_is_one_line(mxnet_python, tmp_path):
    with pytest.raises(InputError, match="DMLC_NUM_SERVER=none"):
        MXNET_KVSTORE.record(spec(mxnet_python, "plain", DMLC_NUM_SERVER="none"), tmp_path / "t")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc")
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_servers_on_the_workers_hosts_share_their_links_and_are_known_there(servers, mxnet_python, tmp_path, monkeypatch):
    """Every host is asked what its link carried before it is gone: 14 steps, and what of the first weights goes to other hosts."""
    sent_bytes: list[int] = []

    class Counted(ShapedHosts):
        def close(self) -> None:
            sent_bytes[:] = [self.sent_bytes(host) for host in range(len(self.names))]
            super().close()

    monkeypatch.setattr("dpro_search.collect.launch.netns.ShapedHosts", Counted)
    placed = spec(mxnet_python, "wide", DMLC_NUM_SERVER=str(servers), DPRO_SEARCH_SERVER_HOSTS="workers")
    trace = MXNET_KVSTORE.record(placed, tmp_path / "t", rate_bps=1e9, shaped=True, schedule=SCHEDULE)
    placed_on = {1: ("h0",), 2: ("h1", "h0"), 3: ("h1", "h0", "h0")}[servers]  # in the order of the store's own numbers
    assert trace.meta.hosts == ("h0", "h1", *placed_on)
    assert trace.meta.knobs["DPRO_SEARCH_SERVER_HOSTS"] == "workers"
    job = recorded_kvstore_job(trace)
    assert job.server_host == hosts_of_workers(2, servers)
    again = recorded_job(trace)
    assert (again.shaped, again.spec.env["DPRO_SEARCH_SERVER_HOSTS"]) == (True, "workers")
    loads = process_loads(job)
    assert len(sent_bytes) == 2
    for host, counted in enumerate(sent_bytes):
        of_step = sum(load.sent_bytes for load, at in zip(loads, job.host, strict=True) if at == host)
        assert 14 * of_step <= counted <= 1.04 * 15 * of_step, "heads and acknowledgements take some percent"


def test_raw_files_of_another_recorder_are_refused(tmp_path):
    (tmp_path / "job.json").write_text(json.dumps({"format": "pytorch-ddp"}))
    with pytest.raises((InputError, TraceFormatError)):
        assemble_kvstore(tmp_path)
