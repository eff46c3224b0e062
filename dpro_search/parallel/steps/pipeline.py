"""`pipeline_orders`: in which order each rank of a pipeline runs the forward and backward passes of its stages.

Orders are those of Megatron-LM and of torch.distributed.pipelining (an integration test compares them with the latter's). A
backward pass is one, or two: the gradient of the stage's input, which the stage before waits for, and the gradients of its weights,
which nobody waits for and which fill the bubble (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast

from dpro_search.parallel.schedule import Schedule, check_schedule, rounds

Direction = Literal["F", "B", "I", "W"]
"""Forward; whole backward; backward for the gradient of the input alone; for those of the weights alone."""


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    direction: Direction
    stage: int
    micro_batch: int


Order = tuple[Pass, ...]


def pipeline_orders(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[Order, ...]:
    """Passes of each rank in order.

    Raises
    ------
    InputError
        The schedule cannot have so many stages on a rank, or needs another number of micro-batches.
    """
    check_schedule(schedule, ranks, stages_per_rank, micro_batches)
    if schedule is Schedule.ONE_F_ONE_B and stages_per_rank > 1:
        schedule = Schedule.INTERLEAVED
    order = _ORDERS[schedule]
    return tuple(order(rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks))


def _gpipe(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    forward = tuple(Pass("F", rank, number) for number in range(micro_batches))
    return (*forward, *(Pass("B", rank, number) for number in range(micro_batches)))


def _one_f_one_b(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """As many forward passes as ranks behind this one, then one and one in turn (Narayanan et al. 2019)."""
    return _in_turn(*_rounds_of(rank, ranks, 1, micro_batches, "B"), ranks - rank - 1)


def _interleaved(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """Rounds of micro-batches go through all stages of a rank in turn (Narayanan et al. 2021, section 2.2)."""
    ahead = 2 * (ranks - rank - 1) + (stages - 1) * (micro_batches // rounds(ranks, micro_batches))
    return _in_turn(*_rounds_of(rank, ranks, stages, micro_batches, "B"), ahead)


def _zero_bubble(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """ZB-H1, and its interleaved form: 1F1B whose gradients of weights lag `rank` passes behind (Qi et al. 2024, section 2.1).

    Forward passes run ahead by one for each rank behind this one, also where stages are interleaved.
    """
    ahead = (ranks - rank - 1) + (stages - 1) * (micro_batches // rounds(ranks, micro_batches))
    forward, inputs = _rounds_of(rank, ranks, stages, micro_batches, "I")
    order: list[Pass] = []
    waiting: deque[Pass] = deque()
    done = 0
    for step in _in_turn(forward, inputs, ahead):
        order.append(step)
        if step.direction == "I":
            waiting.append(step._replace(direction="W"))
            done += 1
            if done > rank:
                order.append(waiting.popleft())
    return (*order, *waiting)


def _rounds_of(rank: int, ranks: int, stages: int, micro_batches: int, back: Direction) -> tuple[list[Pass], list[Pass]]:
    """Forward and backward passes of a rank, each in their order."""
    size = micro_batches // rounds(ranks, micro_batches)

    def numbered(number: int) -> tuple[int, int]:
        group, place = divmod(number, size * stages)
        return place // size, group * size + place % size

    chunks = [numbered(number) for number in range(micro_batches * stages)]
    forward = [Pass("F", chunk * ranks + rank, micro_batch) for chunk, micro_batch in chunks]
    return forward, [Pass(back, (stages - 1 - chunk) * ranks + rank, micro_batch) for chunk, micro_batch in chunks]


def _in_turn(forward: Sequence[Pass], backward: Sequence[Pass], ahead: int) -> Order:
    """Some forward passes ahead, then one forward and one backward pass in turn, then what is left."""
    ahead = min(ahead, len(forward))
    order = list(forward[:ahead])
    for one, other in zip(forward[ahead:], backward, strict=False):
        order += [one, other]
    return (*order, *backward[len(forward) - ahead :])


class _VShaped:
    """Passes of a rank that has two stages, like one on the way down a V (0) and one on the way up (1)."""

    def __init__(self, *stages: int) -> None:
        self.order: list[Pass] = []
        self._stages = stages
        self._counts: Counter[tuple[str, int]] = Counter()
        self._waiting: deque[Pass] = deque()  # gradients of weights that are left for later

    def count(self, direction: Direction, chunk: int) -> int:
        """Passes of a chunk so far; a whole backward pass counts as both of its parts."""
        return self._counts[direction, chunk]

    def add(self, steps: str, times: int = 1) -> None:
        """Passes as ``"F0 I1"``: the next micro-batch through that stage, `times` times over."""
        for _ in range(times):
            for step in steps.split():
                self._add(cast("Direction", step[0]), int(step[1]))

    def _add(self, direction: Direction, chunk: int) -> None:
        number = self._counts["I" if direction == "B" else direction, chunk]
        self.order.append(Pass(direction, self._stages[chunk], number))
        for part in ("I", "W") if direction == "B" else (direction,):
            self._counts[part, chunk] += 1

    def add_split(self, chunk: int) -> None:
        """A gradient of the input whose gradients of weights are left for later."""
        self._waiting.append(Pass("W", self._stages[chunk], self._counts["I", chunk]))
        self._add("I", chunk)

    def add_waiting(self, times: int = 1) -> None:
        """The gradients of weights that wait longest, if there are any."""
        for _ in range(min(times, len(self._waiting))):
            oldest = self._waiting.popleft()
            self.order.append(oldest)
            self._counts["W", self._stages.index(oldest.stage)] += 1


def _zero_bubble_v(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """ZB-V: no bubble where the three parts of a pass take equally long (Qi et al. 2024, section 6; arXiv 2405.15362)."""
    total = max(2 * ranks - 1, micro_batches)  # fewer do not fill the pipeline: those too many are left out at the end
    steps = _VShaped(rank, 2 * ranks - 1 - rank)
    steps.add("F0", 2 * (ranks - rank) - 1)
    steps.add("F1 F0", rank)
    steps.add("F1 I1 W1", ranks - rank)
    while steps.count("F", 1) < total:
        if steps.count("F", 0) < total:
            steps.add("F0")
        steps.add("I0 W0 F1 I1 W1")
    steps.add("I0 I1", rank)
    steps.add("I0 W0", ranks - rank)
    for chunk in (1, 0):
        steps.add(f"W{chunk}", total - steps.count("W", chunk))
    return tuple(step for step in steps.order if step.micro_batch < micro_batches)


def _dual_pipe_v(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """DualPipeV, the half of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1) that one copy of the parameters needs.

    Forward and backward passes that DualPipe overlaps are one after the other here.
    """
    return _dual_order(_VShaped(rank, 2 * ranks - 1 - rank), rank, ranks, micro_batches)


def _dual_pipe(rank: int, ranks: int, stages: int, micro_batches: int) -> Order:
    """DualPipe: half of the micro-batches come from each end, through a copy of all stages each (DeepSeek's dualpipe.py, `step`).

    A rank takes those first that come from its nearer end, in the order of DualPipeV with half of the ranks.
    """
    forth, back = rank, 2 * ranks - 1 - rank
    near, first, second = (rank, forth, back) if rank < ranks // 2 else (ranks - 1 - rank, back, forth)
    return _dual_order(_VShaped(first, second), near, ranks // 2, micro_batches // 2)


def _dual_order(steps: _VShaped, rank: int, ranks: int, micro_batches: int) -> Order:
    behind = ranks - rank - 1
    steps.add("F0", 2 * behind)
    steps.add("F0 F1", rank + 1)
    for _ in range(behind):
        steps.add_split(1)
        steps.add_waiting()
        steps.add("F1")
    steps.add("F0 B1 F1 B0", micro_batches - 2 * ranks + rank + 1)
    steps.add("B1 F1 B0", behind)
    for number in range(2 * (rank + 1)):  # the second half leaves gradients of weights for later
        chunk = 1 - number % 2
        if number > rank:
            steps.add_split(chunk)
        else:
            steps.add(f"B{chunk}")
    for _ in range(behind):
        steps.add_waiting()
        steps.add_split(0)
    steps.add_waiting(2 * micro_batches)
    return tuple(steps.order)


_ORDERS: dict[Schedule, Callable[[int, int, int, int], Order]] = {
    Schedule.GPIPE: _gpipe,
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.INTERLEAVED: _interleaved,
    Schedule.ZERO_BUBBLE: _zero_bubble,
    Schedule.ZERO_BUBBLE_V: _zero_bubble_v,
    Schedule.DUAL_PIPE_V: _dual_pipe_v,
    Schedule.DUAL_PIPE: _dual_pipe,
}
