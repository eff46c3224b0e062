"""``with_low_rank_buckets(edit, ...)``: a recorded DistributedDataParallel step whose buckets PowerSGD sends, on CPU ranks.

The exported hook waits for each of a bucket's all-reduces where the bucket is full, and computes between them on the thread of the
backward pass (`costmodel.powersgd`). So the recorded posts and all-reduces are taken out, and up to three take the place of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.collect.trace import CollectiveKind, Ints
from dpro_search.costmodel.collectives.recorded import CollectivePrices
from dpro_search.costmodel.powersgd import SENT_PARTS, low_rank
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.gradient_events import Gradients
from dpro_search.space.recorded.buckets import (
    BucketPlan,
    RecordedRank,
    last_gradients,
    leave_out_spans,
    let_copies_wait,
    post_bucket,
    recorded_ranks,
)
from dpro_search.space.recorded.step_edit import StepEdit


def with_low_rank_buckets(
    edit: StepEdit, gradients: Gradients, step: int, plan: BucketPlan, rank: int, prices: CollectivePrices
) -> None:
    """Change a step of all ranks.

    Parameters
    ----------
    edit
        Of the step, cut at its gradients.
    plan
        Its gradients are not halves.
    rank
        Of PowerSGD's matrices, one of `costmodel.powersgd.RANKS`.

    Raises
    ------
    InputError
        The price of an all-reduce is not known.
    """
    ranks, bucket_of = recorded_ranks(edit, gradients, step), plan.bucket_of
    leave_out_spans(edit, ranks, plan)
    factors, last = low_rank(gradients.tensors, bucket_of, rank), last_gradients(bucket_of)
    for each in ranks:  # before posts are put in where these end
        for post in each.gradients.posts:
            edit.leave_out_time(each.device, post.start_us, post.end_us)
    ends: list[list[int]] = [[] for _ in ranks]  # the last op of each bucket, by rank
    for bucket, gradient in enumerate(last):
        sent_bytes, stages_us = factors.sent_bytes[bucket].tolist(), factors.stages_us[bucket].tolist()
        shared = [edit.new_collective() if size and len(ranks) > 1 else -1 for size in sent_bytes]
        for each, of_rank in zip(ranks, ends, strict=True):
            end = _computed(edit, each, gradient, stages_us[0], f"bucket {bucket}")
            for name, size, collective, stage_us in zip(SENT_PARTS, sent_bytes, shared, stages_us[1:], strict=True):
                if size:
                    price_us = prices.price_us(CollectiveKind.ALL_REDUCE, size)
                    each.new_parts.append(post_bucket(edit, each, gradient, price_us, f"{name} of bucket {bucket}", collective))
                end = _computed(edit, each, gradient, stage_us, f"bucket {bucket}")
                if size:
                    edit.need(each.new_parts[-1], end)
            of_rank.append(end)
    for each, of_rank in zip(ranks, ends, strict=True):
        _without_recorded(edit, each, gradients, bucket_of, of_rank, last)
        each.new_parts = of_rank
        let_copies_wait(edit, each, bucket_of)


def _computed(edit: StepEdit, each: RecordedRank, gradient: int, duration_us: float, name: str) -> int:
    """Compute where a gradient is ready, behind what was put in there before."""
    at = edit.cut(each.device, each.gradients.ready[gradient].end_us)
    kind = OpKind(edit.kind[at if at >= 0 else 0])
    return edit.insert(each.device, duration_us, kind, f"PowerSGD of {name}@{each.gradients.rank}", after=at)


def _without_recorded(
    edit: StepEdit, each: RecordedRank, gradients: Gradients, bucket_of: Ints, ends: Sequence[int], last: Sequence[int]
) -> None:
    """Take out the recorded all-reduces, and let what needed them need the bucket of the same gradients."""
    for part, gradient in zip(each.parts, last_gradients(gradients.bucket_of), strict=True):
        bucket = int(bucket_of[gradient])
        until_us = each.gradients.ready[last[bucket]].end_us
        for user in edit.forget_users(part):
            if edit.decided_us(user) > until_us:  # what was decided before the bucket was full waited for it only by chance
                edit.need(ends[bucket], user)
        for user in edit.carried_users(part):
            edit.carry(ends[bucket], user)
        for op in (part, edit.pause_of(part), edit.launch_of(part)):
            if op >= 0:
                edit.take_out(op)
