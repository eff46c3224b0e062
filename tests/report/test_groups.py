"""What carries the gradients of real recordings of each kind of job, as recorded and under a plan."""

import pytest
from sample import sample, schedule

from dpro_search.kinds import job_of
from dpro_search.kinds.horovod.collectives import replayed_groups
from dpro_search.report.timeline import typical_step
from dpro_search.space.plan import Plan
from tests.recordings import trace_of


def groups_of(trace, step, plan):
    here = job_of(trace)
    return here.job.tensor_groups(here, step, plan)


def test_groups_that_a_limit_makes_hold_every_tensor_once():
    whole = sum(tensor.size_bytes for tensor in sample().tensors)
    for plan in (Plan.of(fusion_threshold_bytes=0), Plan.of(fusion_threshold_bytes=2**20), Plan.of(cycle_time_us=20e3)):
        tensor_groups = replayed_groups(schedule(plan))
        assert sum(group.count for group in tensor_groups) == len(sample().tensors)
        assert sum(group.size_bytes for group in tensor_groups) == whole
    assert {group.count for group in replayed_groups(schedule(Plan.of(fusion_threshold_bytes=0)))} == {1}


@pytest.mark.parametrize(
    "plan", [None, Plan.of(cycle_time_us=5e3), Plan(tensor_groups=((sample().tensors[0].name, sample().tensors[1].name),))]
)
def test_a_horovod_job_has_collectives(plan):
    tensor_groups = groups_of(sample(), typical_step(sample()), plan)
    assert next(iter(tensor_groups.groups)) == "as recorded"
    assert len(tensor_groups.groups) == (1 if plan is None else 2)
    assert {sum(group.size_bytes for group in groups) for groups in tensor_groups.groups.values()} == {
        sum(tensor.size_bytes for tensor in sample().tensors)
    }


def test_a_ddp_job_has_buckets_that_follow_the_limit():
    trace = trace_of("ddp_mlp")
    tensor_groups = groups_of(trace, None, Plan.of(bucket_cap_bytes=1))
    recorded, planned = tensor_groups.groups.values()
    assert tensor_groups.noun == "bucket"
    assert len(recorded) == 2
    assert {group.count for group in planned} == {1}
    names = [sorted(name for group in groups for name in group.tensors) for groups in (recorded, planned)]
    assert names[0] == names[1]


def test_a_job_with_servers_has_messages_for_each_of_them():
    trace = trace_of("byteps_mlp")
    tensor_groups = groups_of(trace, None, Plan(servers=1))
    assert list(tensor_groups.groups) == ["as recorded, server 0", "as recorded, server 1", "1 server, server 0"]
    sizes = [sum(group.size_bytes for group in groups) for groups in tensor_groups.groups.values()]
    assert sizes[0] + sizes[1] == sizes[2] == sum(tensor.size_bytes for tensor in trace.tensors)
