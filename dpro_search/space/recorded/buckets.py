"""``with_buckets(edit, ...)``: a recorded DistributedDataParallel step with other buckets, as DDP's reducer would run it.

A bucket is posted where its last gradient has been copied into it. A recorded post that stays, because a bucket ends with the same
gradient, is left as it was; others are taken out, with the time that they took of the host thread, and new ones are put in. Copies
out of a bucket wait for it, on the device's stream or, where none exists, on the host thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dpro_search.collect.trace import CollectiveKind, Floats, Ints, Trace
from dpro_search.costmodel.collectives.recorded import CollectivePrices
from dpro_search.costmodel.compressed_gradients import half_back_us, half_cast_us
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.gradient_events import Gradients, StepGradients
from dpro_search.graph.marked_spans import ThreadSpan
from dpro_search.space.recorded.step_edit import StepEdit

_LEAST_SHARE = 0.5  # of its price, that a bucket takes at least, however fast the one recorded in its place was
_CAST_BYTES = 6  # that a cast of a float32 reads and writes; a copy reads and writes 8


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Changes of the buckets.

    Attributes
    ----------
    bucket_of
        Bucket of each gradient, in the order in which they become ready, [n].
    half
        Whether a communication hook makes halves of float32 gradients.
    as_views
        Whether gradients are views of the buckets, so that nothing is copied out of them.
    static
        Whether the graph is declared static, so that unused parameters are not searched.
    """

    bucket_of: Ints
    half: bool = False
    as_views: bool = False
    static: bool = False


@dataclass
class RecordedRank:
    """The ops of one rank that carry out the recorded buckets."""

    gradients: StepGradients
    device: int  # the host thread that posts
    parts: list[int]  # the op that is its part of each recorded all-reduce
    posts_us: float  # what a post takes of the host thread
    launch_us: float
    new_parts: list[int] = field(default_factory=list)


def thread_devices(edit: StepEdit) -> dict[tuple[int, str], int]:
    """Devices of an edit by rank and name."""
    names = [name.rpartition(" of rank ")[0] for name in edit.device_names]
    return {(rank, name): device for device, (rank, name) in enumerate(zip(edit.rank_of_device, names, strict=True))}


def cut_at_gradients(edit: StepEdit, gradients: Gradients, step: int) -> None:
    """Cut host threads where gradients are ready, buckets are posted, and copies begin and end: plans then change whole ops."""
    devices = thread_devices(edit)
    for (_, number), rank_gradients in gradients.steps.items():
        if number != step:
            continue
        for span in (*rank_gradients.ready, *rank_gradients.posts, *rank_gradients.back, *rank_gradients.searches):
            device = devices.get((rank_gradients.rank, f"host thread {-span.thread}"))
            if device is not None:
                edit.cut(device, span.start_us)
                edit.cut(device, span.end_us)


def explain_copies(edit: StepEdit, trace: Trace, gradients: Gradients, step: int) -> None:
    """Let the first copy out of each recorded bucket need its all-reduce, as DDP makes the device's stream wait for it."""
    if not gradients.has_copies:
        return
    for (_, number), rank_gradients in gradients.steps.items():
        if number != step:
            continue
        for bucket, part in enumerate(rank_gradients.parts):
            span = rank_gradients.back[int(np.flatnonzero(gradients.bucket_of == bucket)[0])]
            if span.events:
                edit.explain_event(trace, part, span.events[0])


def with_buckets(edit: StepEdit, gradients: Gradients, step: int, plan: BucketPlan, prices: CollectivePrices) -> None:
    """Change a step of all ranks.

    Parameters
    ----------
    edit
        Of the step, cut at its gradients.

    Raises
    ------
    InputError
        A price is not known.
    """
    ranks = recorded_ranks(edit, gradients, step)
    sizes = np.array([tensor.size_bytes for tensor in gradients.tensors], np.float64) * gradients.share
    leave_out_spans(edit, ranks, plan)
    recorded_last, last = last_gradients(gradients.bucket_of), last_gradients(plan.bucket_of)
    bytes_: Floats = np.asarray(np.bincount(plan.bucket_of, weights=sizes), np.float64)
    recorded_bytes = np.bincount(gradients.bucket_of, weights=sizes)
    for number, gradient in enumerate(last):
        stays = recorded_last.index(gradient) if gradient in recorded_last else -1
        same = stays >= 0 and bool(((plan.bucket_of == number) == (gradients.bucket_of == stays)).all())
        moved = bytes_[number] / 2 if plan.half else bytes_[number]
        price_us = None if same and not plan.half else prices.price_us(CollectiveKind.ALL_REDUCE, moved)
        collective = edit.new_collective() if len(ranks) > 1 and stays < 0 else -1
        for each in ranks:
            if stays >= 0:
                part = each.parts[stays]
                if price_us is not None:
                    waits_us = edit.duration_us[part] - prices.price_us(CollectiveKind.ALL_REDUCE, recorded_bytes[stays])
                    edit.duration_us[part] = max(price_us + waits_us, _LEAST_SHARE * price_us)
            else:
                assert price_us is not None, "a new bucket"
                part = post_bucket(edit, each, gradient, price_us, f"bucket {number}", collective)
            each.new_parts.append(part)
    for each in ranks:
        _rewired(edit, each, gradients, plan, recorded_last, last)
        if plan.half:
            _with_casts(edit, each, plan, last, bytes_)


def leave_out_spans(edit: StepEdit, ranks: Sequence[RecordedRank], plan: BucketPlan) -> None:
    """Take out copies where gradients are views of buckets, and searches for unused parameters where the graph is static."""
    for each in ranks:
        if plan.as_views:
            _without_copies(edit, each)
        for span in each.gradients.searches if plan.static else ():
            edit.leave_out_time(
                thread_devices(edit)[each.gradients.rank, f"host thread {-span.thread}"], span.start_us, span.end_us
            )


def recorded_ranks(edit: StepEdit, gradients: Gradients, step: int) -> list[RecordedRank]:
    """The ranks of a step, by what carries out their buckets."""
    devices = thread_devices(edit)
    return [
        _rank(edit, rank_gradients, devices[rank_gradients.rank, f"host thread {-rank_gradients.posts[0].thread}"])
        for (_, number), rank_gradients in gradients.steps.items()
        if number == step and rank_gradients.rank in {rank for rank, _ in devices}
    ]


def _rank(edit: StepEdit, rank_gradients: StepGradients, device: int) -> RecordedRank:
    parts = [edit.event_op[event] for event in rank_gradients.parts]
    launches = [edit.launch_of(part) for part in parts]
    return RecordedRank(
        rank_gradients,
        device,
        parts,
        float(np.median([post.end_us - post.start_us for post in rank_gradients.posts])),
        float(np.median([edit.duration_us[launch] for launch in launches if launch >= 0] or [0.0])),
    )


def last_gradients(bucket_of: Ints) -> list[int]:
    """The last gradient of each bucket."""
    return [int(np.flatnonzero(bucket_of == number)[-1]) for number in range(int(bucket_of.max()) + 1)]


def _without_copies(edit: StepEdit, each: RecordedRank) -> None:
    for span in each.gradients.back:
        edit.leave_out_time(each.device, span.start_us, span.end_us)
        for event in span.events:
            edit.duration_us[edit.event_op[event]] = 0.0


def post_bucket(edit: StepEdit, each: RecordedRank, gradient: int, price_us: float, name: str, collective: int) -> int:
    """Post a new bucket where a gradient is ready, and enqueue it on the stream behind those posted before."""
    rank, ready = each.gradients.rank, each.gradients.ready[gradient]
    model, device = _stream(edit, each)
    at = edit.cut(each.device, ready.end_us)
    post = edit.insert(each.device, each.posts_us, OpKind(edit.kind[at if at >= 0 else 0]), f"post of {name}@{rank}", after=at)
    launching = edit.device[launch] if (launch := edit.launch_of(each.parts[0])) >= 0 else each.device
    before = next((part for part in reversed(each.new_parts) if edit.device[part] == device), None)
    behind = before
    if before is None:  # behind what the stream runs before the first bucket
        behind = edit.previous(edit.first_of(model))
    needs = [post]
    if launch >= 0:
        launched = edit.insert(launching, each.launch_us, OpKind.HOST, f"launch of {name}@{rank}")
        edit.need(post, launched)
        needs = [launched]
    if collective >= 0:  # the stream waits in it until its own rank takes part
        pause = edit.insert(device, 0.0, OpKind.COMM, f"before {name}@{rank}", after=behind)
        for need in needs:
            edit.need(need, pause)
        needs, behind = [pause], pause
    part = edit.insert(device, price_us, OpKind.COMM, f"{name}@{rank}", after=behind, collective=collective)
    for need in needs:
        edit.need(need, part)
    return part


def _stream(edit: StepEdit, each: RecordedRank) -> tuple[int, int]:
    """The first recorded bucket on the stream (of Gloo's threads, that with the fewest buckets so far), and the stream."""
    first = {edit.device[part]: part for part in reversed(each.parts)}
    used = [edit.device[part] for part in each.new_parts]
    device = min(first, key=lambda one: (used.count(one), one))
    return first[device], device


def _rewired(
    edit: StepEdit, each: RecordedRank, gradients: Gradients, plan: BucketPlan, recorded_last: list[int], last: list[int]
) -> None:
    """Take out recorded buckets that are no more, and let what needed them need the bucket of the same gradients."""
    bucket_of = plan.bucket_of.tolist()
    for number, gradient in enumerate(recorded_last):
        part, new = each.parts[number], each.new_parts[bucket_of[gradient]]
        changed = part != new or (plan.bucket_of == bucket_of[gradient]).sum() != (gradients.bucket_of == number).sum()
        if changed:
            copies = _first_copies(edit, each)
            until_us = each.gradients.ready[last[bucket_of[gradient]]].end_us
            if np.isfinite(posted_us := edit.decided_us(new)):
                until_us = max(until_us, posted_us)
            for user in edit.forget_users(part):
                # What was decided before the bucket was posted waited for the recorded one only by chance.
                if user not in copies and edit.decided_us(user) > until_us:
                    edit.need(new, user)
            for user in edit.carried_users(part):
                edit.carry(new, user)
        if part not in each.new_parts:
            pause, launch = edit.pause_of(part), edit.launch_of(part)
            post = each.gradients.posts[number]
            edit.leave_out_time(each.device, post.start_us, post.end_us)
            for op in (part, pause, launch):
                if op >= 0:
                    edit.take_out(op)
    for number, gradient in enumerate(last):
        part = each.new_parts[number]
        for event in each.gradients.ready[gradient].events:
            pause = edit.pause_of(part)
            edit.need(edit.event_op[event], pause if pause >= 0 else part)
    let_copies_wait(edit, each, plan.bucket_of)


def _first_copies(edit: StepEdit, each: RecordedRank) -> set[int]:
    """Ops that copy gradients out of buckets: device ops, or stretches of the host thread if no device was recorded."""
    copies = {edit.event_op[event] for span in each.gradients.back for event in span.events}
    if not copies:
        for span in each.gradients.back:  # with the stretch from the wait to the copy
            copies.update((edit.cut(each.device, span.start_us), *edit.within(each.device, span.start_us, span.end_us)))
    return copies


def let_copies_wait(edit: StepEdit, each: RecordedRank, bucket_of: Ints) -> None:
    """Let the first copy out of each bucket need it."""
    back = each.gradients.back
    if len(back) != len(bucket_of):
        return
    waited: set[int] = set()
    for gradient, number in enumerate(bucket_of.tolist()):
        if number in waited:
            continue
        waited.add(number)
        target = _start_of(edit, each, back[gradient])
        if target >= 0:
            edit.need(each.new_parts[number], target)


def _start_of(edit: StepEdit, each: RecordedRank, span: ThreadSpan) -> int:
    if span.events:
        return edit.event_op[span.events[0]]
    return edit.after(edit.cut(each.device, span.start_us))


def _with_casts(edit: StepEdit, each: RecordedRank, plan: BucketPlan, last: list[int], bytes_: Floats) -> None:
    """Each bucket is made halves of before its all-reduce, and the result is copied back into it before its gradients are."""
    copies = [edit.event_op[event] for span in each.gradients.back for event in span.events]
    ready = each.gradients.ready
    # The host launches a cast and a division.
    launches_us = 2 * float(np.median([span.end_us - span.start_us for span in each.gradients.back] or [0.0]))
    hooks = edit.new_device(each.gradients.rank, "hooks") if copies else -1
    for number, gradient in enumerate(last):
        part, rank = each.new_parts[number], each.gradients.rank
        back = {op for op in edit.users[part] if op in (set(copies) or _first_copies(edit, each))}
        if not copies:  # on the host: the thread casts, and Gloo's casts back
            size = np.array([bytes_[number]])
            at = edit.cut(each.device, ready[gradient].end_us)
            kind = OpKind(edit.kind[at if at >= 0 else 0])
            edit.insert(each.device, float(half_cast_us(size)[0]), kind, f"cast of bucket {number}@{rank}", after=at)
            edit.duration_us[part] += float(half_back_us(size)[0])
            continue
        members = np.flatnonzero(plan.bucket_of == number).tolist()
        moved_us = sum(edit.recorded_us(edit.event_op[event]) for m in members for event in each.gradients.back[m].events)
        cast_us = moved_us * _CAST_BYTES / 8
        if ready[gradient].events:
            source = edit.event_op[ready[gradient].events[-1]]
            cast = edit.insert(edit.device[source], cast_us, OpKind.BACKWARD, f"cast of bucket {number}@{rank}", after=source)
            pause = edit.pause_of(part)
            edit.need(cast, pause if pause >= 0 else part)
            at = edit.cut(each.device, ready[gradient].end_us)
            edit.insert(each.device, launches_us, OpKind.HOST, f"launch of the cast of bucket {number}@{rank}", after=at)
        cast_back = edit.insert(hooks, cast_us, OpKind.IO, f"cast back of bucket {number}@{rank}")
        edit.need(part, cast_back)
        for target in back:
            edit.need(cast_back, target)
