"""Workers of unequal speed, from two recorded runs of a real job to a real run of the best scheme."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dpro_search.collect.launch.host_limits import HostLimits
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.errors import InputError, JobError
from dpro_search.kinds import described_job, job_of, load_source
from dpro_search.kinds.synchronised import recorded_runs
from dpro_search.kinds.synchronised.real_runs import _environment, train
from dpro_search.runtime.schemes import parse_scheme
from dpro_search.space.plan import Plan
from tests.kinds.verbs import verb

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("trained_job.py")
WORKERS, TARGET = 3, 1.0


def recorded(python: str, scheme: str, folder: Path, path: Path) -> None:
    """Train once, as a user would before a search."""
    parsed = parse_scheme(scheme)
    env = _environment(parsed) | {
        "DPRO_SEARCH_RECORD": str(path),
        "DPRO_SEARCH_TARGET_LOSS": str(TARGET),
        "DPRO_SEARCH_LIMIT_S": "60",
    }
    folder.mkdir()
    train(JobSpec(command=(python, str(JOB)), ranks=WORKERS, env=env, timeout_s=600), folder, parsed, "pytorch")


@pytest.fixture(scope="module")
def recording(synchronisation_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an all-reduce in rounds, which is today's scheme, and of a parameter server."""
    folder = tmp_path_factory.mktemp("trained")
    for number, scheme in enumerate(("local-sgd(steps=4)", "asp")):
        recorded(synchronisation_python, scheme, folder / str(number), folder / "runs.jsonl")
    return folder / "runs.jsonl"


def test_workers_record_what_they_did(recording: Path) -> None:
    recording_of_runs = recorded_runs(recording)
    assert recording_of_runs is not None
    rounds, free = recording_of_runs.runs
    assert [str(run.scheme) for run in recording_of_runs.runs] == ["local-sgd(steps=4)", "asp"]
    for run in recording_of_runs.runs:
        assert run.curve[1].min() <= TARGET < run.start_loss
        assert run.step_s[2] > 1.3 * run.step_s[0]
    assert set(rounds.steps.tolist()) == {4.0}
    assert rounds.weights == pytest.approx(1 / WORKERS)
    assert free.waiting_share < rounds.waiting_share
    assert free.behind_steps.max() > 0


def test_the_best_scheme_is_searched_and_trained_for_real(recording: Path, synchronisation_python: str, tmp_path: Path) -> None:
    facts = verb("run", recording, "--trials", 60, "--out", tmp_path / "run")
    plan = Plan.of(**facts["plans"][0]["plan"])
    source = load_source(recording)
    job = described_job(source, job_of(source), tmp_path / "run", (synchronisation_python, str(JOB)))
    run = job.run(plan, warmup=0, timeout_s=60.0)
    (trained,) = job.trained()
    assert trained.synchronisation == plan.synchronisation
    assert trained.final_loss <= TARGET
    assert run.times.median_us == pytest.approx(1e6 * trained.time_s)
    assert 0 < trained.commits <= trained.steps
    with pytest.raises(JobError, match=r"the target loss of 1e-09 was not reached") as refused:
        replace(job, target_loss=1e-9).run(plan, warmup=0, timeout_s=2.0)
    assert "\n" not in str(refused.value)


GROUP = """
import os, runpy
from pathlib import Path
Path("{folder}", os.environ["RANK"]).write_text(Path("/proc/self/cgroup").read_text())
runpy.run_path("{job}", run_name="__main__")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="CPU quotas need root")
def test_workers_train_under_quotas(recording: Path, synchronisation_python: str, tmp_path: Path) -> None:
    verb("run", recording, "--trials", 60, "--out", tmp_path / "run")
    source = load_source(recording)
    command = (synchronisation_python, "-c", GROUP.format(folder=tmp_path, job=JOB))
    job = described_job(source, job_of(source), tmp_path / "run", command)
    quotas = HostLimits.parse("1,1,1", ["1s:h2.cpus=0.5"])
    replace(job, spec=replace(job.spec, limits=quotas)).run(Plan(), warmup=0, timeout_s=60.0)
    groups = [re.search(r"dps\d+h\d+", (tmp_path / str(rank)).read_text()) for rank in range(WORKERS)]
    assert [group and group[0] for group in groups] == [f"dps{os.getpid()}h{rank}" for rank in range(WORKERS)]
    link = HostLimits.parse(None, ["1s:h2.rate=1mbit"])
    with pytest.raises(InputError, match="workers of this job have no links of their own"):
        replace(job, spec=replace(job.spec, limits=link)).run(Plan(), warmup=0, timeout_s=60.0)
