"""Synchronisation schemes in real MXNet jobs on ps-lite: workers of unequal speed that learn handwritten digits."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dpro_search.collect.launch.parameter_servers import ServerSpec, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec, end_process, free_port, start_process
from dpro_search.costmodel.convergence import reached_at
from dpro_search.errors import JobError
from dpro_search.kinds import described_job, job_of, load_source
from dpro_search.kinds.synchronised import recorded_runs
from dpro_search.kinds.synchronised.recording import RecordedRun
from dpro_search.space.plan import Plan
from tests.kinds.verbs import verb

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("kvstore_digits_job.py")
MIX = (0.12, 0.12, 0.06, 0.04)  # seconds of a step at speeds 1:1:2:3
TARGET = 0.8


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    digits_data = load_digits()
    np.savez(path, data=digits_data.data, target=digits_data.target)
    return path


@dataclass
class Job:
    """MXNet workers with servers; each job has a folder."""

    python: str
    digits: Path
    folder: Path

    def train(
        self, scheme: str, step_s: tuple[float, ...], steps: int | None = None, *, servers: int = 1, more: str = "", **env: str
    ) -> tuple[list[dict[str, Any]], RecordedRun]:
        """Run all to their end: what each worker says at its end, and the recording."""
        runs = self.folder / "runs.jsonl"
        words = [str(self.digits), ",".join(map(str, step_s)), *([] if steps is None else [str(steps)]), *more.split()]
        given = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DPRO_SEARCH_SYNCHRONISATION": scheme,
            "DPRO_SEARCH_RECORD": str(runs),
        }
        spec = JobSpec(command=(self.python, str(JOB), *words), ranks=len(step_s), env=given | env, timeout_s=300)
        place = ServerSpec(count=servers, worker_env=lambda rank: {"RANK": str(rank)})
        run_with_servers(spec, self.folder, place)
        recorded = recorded_runs(runs)
        assert recorded is not None
        return [ended for rank in range(len(step_s)) for ended in events(self.folder / f"rank{rank}", "done")], recorded.runs[-1]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    log = folder / "log"
    lines = log.read_text().splitlines() if log.is_file() else []
    said = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [each for each in said if each["event"] == name]


@pytest.fixture
def job(mxnet_python: str, digits: Path, tmp_path: Path) -> Job:
    return Job(mxnet_python, digits, tmp_path)


@pytest.mark.parametrize(("scheme", "servers", "more"), [("asp", 2, ""), ("ssp(staleness=2)", 3, "--module")])
def test_each_update_is_in_the_model_once_on_every_server(job: Job, scheme: str, servers: int, more: str) -> None:
    ended, run = job.train(scheme, (0.01, 0.03), 110, servers=servers, more=more)
    assert [facts["commits"] for facts in ended] == [110, 110]
    last = max(ended, key=lambda facts: sum(facts["updates"]))  # who asked when the other had ended
    assert last["updates"] == [220] * servers
    assert last["all_commits"] == [110, 110]
    assert run.losses[-20:].mean() < 0.5 * run.losses[:20].mean()  # it learns
    assert run.framework == "mxnet"
    if scheme == "asp":
        assert sum(run.waited_s.values()) < 0.1 * run.end_s


def test_adsp_commits_equally_often_and_reaches_the_loss_before_dist_sync(job: Job) -> None:
    goal = {"DPRO_SEARCH_TARGET_LOSS": str(TARGET), "DPRO_SEARCH_LIMIT_S": "120"}
    _, bound = job.train("dist_sync", MIX, 110, **goal)
    _, free = job.train("adsp(commits=8)", MIX, **goal)
    commits = [int((free.worker == worker).sum()) for worker in range(4)]
    assert max(commits) - min(commits) <= 2
    steps = [int(free.steps[free.worker == worker].sum()) for worker in range(4)]
    assert steps[3] > steps[2] > steps[0]
    assert free.waiting_share < 0.1
    (bound_s,), (free_s,) = reached_at(*bound.curve, [TARGET]), reached_at(*free.curve, [TARGET])
    assert free_s < bound_s < np.inf


def test_recorded_runs_are_searched_and_the_best_scheme_is_trained(job: Job, tmp_path: Path) -> None:
    goal = {"DPRO_SEARCH_TARGET_LOSS": "0.4", "DPRO_SEARCH_LIMIT_S": "120"}
    for scheme in ("bsp", "fixed-adacomm(steps=4)"):
        job.train(scheme, (0.02, 0.04), **goal)
    recording = tmp_path / "runs.jsonl"
    facts = verb("run", recording, "--trials", 40, "--out", tmp_path / "run")
    plan = Plan.of(**facts["plans"][0]["plan"])
    source = load_source(recording)
    command = (job.python, str(JOB), str(job.digits), "0.02,0.04")
    job_to_run = described_job(source, job_of(source), tmp_path / "run", command)
    job_to_run.run(plan, warmup=0, timeout_s=120.0)
    (trained,) = job_to_run.trained()
    assert trained.synchronisation == plan.synchronisation
    assert trained.final_loss <= 0.4


def test_servers_without_dpro_search_are_named_in_one_line(job: Job) -> None:
    command = (job.python, str(JOB), str(job.digits), "0.01")
    spec = JobSpec(command=command, ranks=1, env={"DPRO_SEARCH_SYNCHRONISATION": "asp", "PYTHONPATH": str(ROOT)}, timeout_s=60)
    bare = ServerSpec(count=1, env=(("PYTHONPATH", ""),), worker_env=lambda rank: {"RANK": str(rank)})
    with pytest.raises(JobError, match="the parameter servers cannot import dpro_search"):
        run_with_servers(spec, job.folder, bare)


@pytest.mark.parametrize(
    ("scheme", "trainer", "message"),
    [
        ("local-sgd(steps=4)", "kvstore=None", "local-sgd uses all-reduces, which MXNet's KVStore has not"),
        ("asp", "kvstore='dist_async'", "make the Trainer with kvstore=None"),
        ("asp", "kvstore=None", "DMLC_PS_ROOT_URI is not set; start the job with a scheduler and servers"),
    ],
)
def test_what_cannot_start_is_one_line(mxnet_python: str, scheme: str, trainer: str, message: str) -> None:
    code = (
        "import mxnet as mx; from dpro_search.runtime.synchronisation import synchronise; "
        "net = mx.gluon.nn.Dense(2, in_units=3); net.initialize(); "
        f"synchronise(net, mx.gluon.Trainer(net.collect_params(), 'sgd', {trainer}), '{scheme}')"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([mxnet_python, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]


@dataclass
class Loose:
    """Processes of one job that are started one by one: nothing ends the others when one dies."""

    job: Job
    scheme: str
    root: dict[str, str] = field(default_factory=lambda: {"DMLC_PS_ROOT_PORT": str(free_port())})
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, role: str, command: tuple[str, ...], **env: str) -> None:
        given = {
            **os.environ,
            **self.root,
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_INTERFACE": "lo",
            "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": "2",
            "DMLC_ROLE": role,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DPRO_SEARCH_SYNCHRONISATION": self.scheme,
            **env,
        }
        self.processes[name] = start_process((self.job.python, *command), self.job.folder / name, given)

    def worker(self, name: str, rank: int, *options: str) -> None:
        command = (str(JOB), str(self.job.digits), "0.02,0.02", "110", *options)
        self.start(name, "worker", command, RANK=str(rank))

    def wait_for(self, name: str, event: str) -> dict[str, Any]:
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:
            if matching := events(self.job.folder / name, event):
                return matching[0]
            time.sleep(0.05)
        raise AssertionError(f"{name}: no {event}: {(self.job.folder / name / 'log').read_text()}")


@pytest.fixture
def loose(job: Job) -> Iterator[Any]:
    started: list[Loose] = []

    def begin(scheme: str) -> Loose:
        started.append(Loose(job, scheme))
        for role in ("scheduler", "server"):
            started[-1].start(role, role, ("-c", "import mxnet"))
        for rank in range(2):
            started[-1].worker(f"worker{rank}", rank)
        return started[-1]

    yield begin
    for process in (process for each in started for process in each.processes.values()):
        end_process(process)


def test_workers_go_on_without_a_killed_one_which_ps_lite_does_not_take_back(loose: Any) -> None:
    job = loose("bsp")
    job.wait_for("worker1", "training")
    job.processes["worker1"].kill()
    job.worker("again", 1, "--impatient")
    done = job.wait_for("worker0", "done")
    assert done["commits"] == 110
    assert done["updates"][0] >= sum(done["all_commits"])  # an update may be in the model of which the desk was not told any more
    assert done["updates"][0] <= sum(done["all_commits"]) + 1
    assert job.processes["worker0"].wait(timeout=60) == 0
    assert "a worker that is started again later is not taken back" in job.wait_for("again", "failed")["error"]
