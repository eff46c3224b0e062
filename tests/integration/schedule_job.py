"""The orders of torch.distributed.pipelining's schedules, as JSON on the standard output.

    python schedule_job.py '[["ScheduleInterleaved1F1B", 4, 2, 8], ...]'      # schedule, ranks, stages on each, micro-batches

For each: for each rank the passes as [direction, stage, micro-batch], and how many activations and gradients it sends (schedules
with several stages on a rank; null of others); or null where the schedule refuses these numbers.
"""

import json
import sys
from unittest import mock

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage


def order_of(name, ranks, stages, micro_batches):
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, ranks, None, ranks * stages
    kind = getattr(schedules, name)
    try:
        if issubclass(kind, schedules.PipelineScheduleSingle):
            order = kind(stage, micro_batches).pipeline_order
            sent = None
        else:
            schedule = kind([stage] * stages, micro_batches)
            order = schedule.pipeline_order
            sent = [sends(schedule.pipeline_order_with_comms[rank]) for rank in range(ranks)]
    except ValueError:
        return None
    return {"order": [[list(step) for action in order[rank] for step in passes(action)] for rank in range(ranks)], "sent": sent}


def sends(actions):
    names = [action.computation_type.value for action in actions if action is not None]
    return [names.count("SEND_F"), names.count("SEND_B")]


def passes(action):
    if action is None:
        return
    for step in action.sub_actions or [action]:
        if step.computation_type.value in ("F", "B", "I", "W"):
            yield step.computation_type.value, step.stage_index, step.microbatch_index


json.dump([order_of(*case) for case in json.loads(sys.argv[1])], sys.stdout)
