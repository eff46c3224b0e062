"""Orders of pipelines are those of torch.distributed.pipelining, pass by pass."""

import json
import subprocess
from pathlib import Path

import pytest

from dpro_search.errors import InputError
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.steps.step_costs import LayerCosts, StepCosts
from dpro_search.parallel.steps.step_graph import step_graph

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("schedule_job.py")
TORCH = {
    Schedule.GPIPE: "ScheduleGPipe",
    Schedule.ONE_F_ONE_B: "Schedule1F1B",
    Schedule.INTERLEAVED: "ScheduleInterleaved1F1B",
    Schedule.ZERO_BUBBLE: "ScheduleInterleavedZeroBubble",
    Schedule.ZERO_BUBBLE_V: "ScheduleZBVZeroBubble",
    Schedule.DUAL_PIPE_V: "ScheduleDualPipeV",
}
STAGES = {
    Schedule.GPIPE: (1,),
    Schedule.ONE_F_ONE_B: (1,),
    Schedule.INTERLEAVED: (2, 3, 4),
    Schedule.ZERO_BUBBLE: (1, 2, 3),
    Schedule.ZERO_BUBBLE_V: (2,),
    Schedule.DUAL_PIPE_V: (2,),
}
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17, 24, 32)
CASES = [
    (schedule, ranks, stages, micro_batches)
    for schedule in TORCH  # DualPipe is DeepSeek's own code
    for stages in STAGES[schedule]
    for ranks in (2, 3, 4, 6, 8)
    for micro_batches in MICRO_BATCHES
    # torch's table of 1F1B is wrong for fewer micro-batches than ranks, which its class refuses to run
    if schedule is not Schedule.ONE_F_ONE_B or micro_batches >= ranks
]


@pytest.fixture(scope="module")
def theirs(torch_python):
    schedules = json.dumps([(TORCH[schedule], *numbers) for schedule, *numbers in CASES])
    done = subprocess.run([torch_python, str(JOB), schedules], capture_output=True, text=True, check=True, timeout=300)
    facts = dict(zip(CASES, json.loads(done.stdout), strict=True))
    for (schedule, *_), answer in facts.items():
        if schedule is Schedule.ONE_F_ONE_B:  # its table has the last rank's forward passes from 1 on; the class runs them from 0
            order = answer["order"]
            order[-1] = [[direction, stage, number - (direction == "F")] for direction, stage, number in order[-1]]
    return facts


@pytest.mark.parametrize("schedule", TORCH)
def test_orders_are_those_of_torch(theirs, schedule):
    compared = 0
    for (kind, ranks, stages, micro_batches), expected in theirs.items():
        if kind is not schedule or expected is None:
            continue
        ours = pipeline_orders(schedule, ranks, stages, micro_batches)
        assert [[list(step) for step in order] for order in ours] == expected["order"], (ranks, stages, micro_batches)
        compared += 1
    assert compared >= 30


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.DUAL_PIPE_V])
def test_numbers_that_torch_refuses_are_refused(theirs, schedule):
    refused = [numbers for (kind, *numbers), expected in theirs.items() if kind is schedule and expected is None]
    assert refused
    for ranks, stages, micro_batches in refused:
        if stages > 1:
            with pytest.raises(InputError, match="micro-batches"):
                pipeline_orders(schedule, ranks, stages, micro_batches)


@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE, Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V])
def test_ranks_send_as_often_as_in_torch(theirs, schedule):
    """Stages on the same rank send nothing to each other."""
    layer = LayerCosts(forward_us=1.0, backward_us=2.0, weights_us=1.0)
    for (kind, ranks, stages, micro_batches), expected in theirs.items():
        if kind is not schedule or expected is None or ranks > 4 or micro_batches > 12:
            continue
        costs = StepCosts(stages=((layer,),) * (ranks * stages), send_us=0.1)
        graph = step_graph(costs, pipeline_orders(schedule, ranks, stages, micro_batches))
        sent = [[0, 0] for _ in range(ranks)]
        for name, rank in zip(graph.names, graph.rank_of_op, strict=True):
            if name.startswith("send "):
                sent[rank][not name.startswith("send F")] += 1
        assert sent == expected["sent"], (ranks, stages, micro_batches)
