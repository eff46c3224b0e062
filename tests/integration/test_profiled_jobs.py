"""Real jobs that PyTorch's profiler recorded: imported, searched, exported, and run under the plan, which they follow."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import CollectiveKind, EventKind
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.targets import targets_for
from dpro_search.graph.sharded_units import sharded_units_of
from dpro_search.kinds import PlanOptions, job_of, kind_of, profiled_ddp, profiled_fsdp, recorded_job
from dpro_search.space.plan import Plan
from tests.kinds.verbs import verb

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("profiled_job.py")


def run(python, how, folder, ranks=2, **env):
    folder.mkdir()
    env = {"OMP_NUM_THREADS": "1", **env}
    spec = JobSpec(command=(str(python), str(JOB), how), ranks=ranks, cores=default_cores(ranks), env=env)
    run_torch_ranks(spec, folder)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def recorded(request, torch_python, tmp_path_factory):
    """How the job communicates, its trace, and the folder that holds it."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "profiles").mkdir()
    run(torch_python, request.param, folder / "job", PROFILE_TO=str(folder / "profiles"))
    trace = import_trace([folder / "profiles"])
    trace.save(folder / "trace")
    return request.param, trace, folder


def made(python, how, folder, plan, ranks=2):
    """What a step of the job did under an exported plan: how often each op ran."""
    out = folder / "made.json"
    run(python, how, folder / "run", ranks, MADE_TO=str(out), DPRO_SEARCH_PLAN=str(plan))
    return Counter(json.loads(out.read_text()))


def test_every_step_of_the_profile_is_replayed(recorded):
    """Whatever else runs on the machine: a step's own durations add up to its own time."""
    how, trace, _ = recorded
    assert kind_of(trace) is {"ddp": profiled_ddp, "fsdp": profiled_fsdp}[how].KIND
    replayed = job_of(trace).job.compared(None)
    assert replayed.steps
    assert replayed.measured_us > 0
    assert all(abs(step.error_pct) < 10 for step in replayed.steps)


def test_it_is_searched_and_the_best_plan_runs(recorded, torch_python, tmp_path):
    how, _, folder = recorded
    result = verb("run", folder / "trace", "--trials", 60, "--out", tmp_path / "search")
    assert result["plans"]
    verb("export", tmp_path / "search", "--out", tmp_path / "plan")
    helper = tmp_path / "plan" / f"{how}.py"
    assert helper.exists()
    made(torch_python, how, tmp_path, tmp_path / "plan")


def exported(plan, trace, python, how, folder):
    again = recorded_job(trace, (str(python), str(JOB), how))
    export_plan(plan, folder, targets_for(plan, again.targets), again.facts)


@pytest.mark.parametrize(
    ("how", "settings", "op", "times"),
    [
        ("ddp", {"bucket_cap_bytes": 2**24}, "c10d::allreduce_", 1),
        ("ddp", {"gradient_as_bucket_view": True}, "torch.distributed.ddp.reducer::copy_bucket_to_grad", 0),
        ("ddp", {"compression": "fp16", "bucket_cap_bytes": 2**24}, "c10d::allreduce_", 1),
        # The profiler sees what the backward pass posts. The two that follow are posted by callbacks: on Gloo's threads, where it
        # does not see them, or on this one, if the all-reduce has already ended.
        ("ddp", {"compression": "powersgd-1", "bucket_cap_bytes": 2**24}, "c10d::allreduce_", 1),
        ("fsdp", {"reshard_after_forward": False}, "c10d::_allgather_base_", 5),
        ("fsdp", {"kept_last_units": 1}, "c10d::_allgather_base_", 8),
        ("fsdp", {"kept_units": ("1", "3")}, "c10d::_allgather_base_", 7),
        ("fsdp", {"units_together": 2}, "c10d::_allgather_base_", 5),
        ("fsdp", {"reduce_dtype": "bfloat16", "prefetch": True, "prefetch_depth": 2}, "c10d::_reduce_scatter_base_", 5),
        ("fsdp", {"backward_prefetch_depth": 2}, "c10d::_allgather_base_", 9),
        ("fsdp", {"recomputed_modules": ("0", "1"), "reshard_after_forward": False}, "aten::addmm", 5 + 2),
    ],
)
def test_the_job_follows_the_plan_and_the_plan_is_what_was_predicted(how, settings, op, times, recorded, torch_python, tmp_path):
    kind, trace, _ = recorded
    if kind != how:
        pytest.skip("of the other job")
    plan = Plan.of(**settings)
    job = job_of(trace, PlanOptions(allow_lossy=True))
    predicted = [name for name in job.timeline(plan).graph.names if name.endswith("@0")]
    exported(plan, trace, torch_python, how, tmp_path / "plan")
    made_job = made(torch_python, how, tmp_path, tmp_path / "plan")
    if not str(settings.get("compression")).startswith("powersgd"):
        assert made_job[op] == times
    else:
        assert times <= made_job[op] <= 3 * times
        assert sum(name.startswith(("vectors of", "P of", "Q of")) for name in predicted) == 3 * times
    if op.startswith("c10d") and how == "fsdp" and "allgather" in op:
        assert sum(name.startswith("gloo:all_gather") for name in predicted) == times


def test_four_ranks_share_the_parameters_in_pairs_as_a_plan_says(recorded, torch_python, tmp_path):
    """Each unit is reduced within a pair, and averaged between the pairs."""
    how, trace, _ = recorded
    if how != "fsdp":
        pytest.skip("of the other job")
    exported(Plan.of(shard_ranks=2), trace, torch_python, how, tmp_path / "plan")
    made_job = made(torch_python, how, tmp_path, tmp_path / "plan", ranks=4)
    assert made_job["c10d::_reduce_scatter_base_"] == made_job["c10d::allreduce_"] == 5


def test_pairs_that_share_parameters_are_found_in_a_profile_that_names_no_groups(torch_python, tmp_path):
    (tmp_path / "profiles").mkdir()
    run(torch_python, "hsdp", tmp_path / "job", ranks=4, PROFILE_TO=str(tmp_path / "profiles"))
    trace = import_trace([tmp_path / "profiles"])
    events = trace.events
    groups_of_kinds = {
        (kind, trace.groups[group].ranks)
        for kind, group in zip(events.collective_kind.tolist(), events.group.tolist(), strict=True)
        if group >= 0
    }
    shards, copies = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert groups_of_kinds == {
        *((kind, ranks) for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER) for ranks in shards),
        *((CollectiveKind.ALL_REDUCE, ranks) for ranks in copies),
    }
    parts = np.isin(events.collective_kind, [kind for kind, _ in groups_of_kinds]) & (events.kind == EventKind.COLLECTIVE)
    assert (events.collective[parts] >= 0).all()  # all are matched, each among its own ranks
    assert sharded_units_of(trace).hybrid
    assert sharded_units_of(trace).shared_by == 2
    job = job_of(trace)
    assert abs(job.predict(Plan()).iteration_us / job.measurement.median_us - 1) < 0.2
