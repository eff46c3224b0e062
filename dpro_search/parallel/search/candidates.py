"""`Candidates`: the legal strategies that a search may propose, as a tree whose upper levels decide most of the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from dpro_search.errors import InputError
from dpro_search.parallel.frameworks import Framework
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.model import CapturedModel
from dpro_search.parallel.schedule import V_SHAPED, Schedule
from dpro_search.parallel.settings import OFFLOADS, OPTIONS, Fixed
from dpro_search.parallel.strategy import Recompute, Strategy

LEAST_CONTEXT = 1024  # tokens of a sequence on a rank, below which a split over cp leaves kernels too small to be worth a look
MOST_VIRTUAL = 8  # groups of layers on a pipeline rank
MOST_MICRO_BATCH = 64  # sequences
MOST_HOSTS_OF_TP = 2  # over which tensor parallel ranks may be spread
_OF_SHAPES = ("tp", "pp", "dp", "cp", "ep", "etp", "sequence_parallel", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of a search in addition to degrees, which follow from the model, the batch and the devices."""

    zero_stages: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    ranks_per_host: int
    schedules: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
    uneven_stages: bool = False
    replicates: bool = False
    rings: bool = False
    recomputes_some: bool = False


def choices_of(fixed: Fixed, framework: Framework, ranks_per_host: int) -> Choices:
    """Those of a framework; selective recomputation only where it computes anything again."""
    selective = (Recompute.SELECTIVE,) if framework.runtime.has_selective else ()
    return Choices(
        zero_stages=tuple(sorted({*framework.zero_stages, fixed.zero_stage})),
        recompute=(*selective, Recompute.FULL) if fixed.layer_count else (),
        ranks_per_host=ranks_per_host,
        schedules=framework.schedules,
        uneven_stages=framework.uneven_stages,
        replicates=framework.replicates,
        rings=framework.rings,
        recomputes_some=framework.recomputes_some,
    )


Recomputation = tuple[Recompute, int]
Option = TypeVar("Option")


def recomputing(split: Strategy, again: Recomputation) -> Strategy:
    """A split that computes some activations again."""
    return replace(split, recompute=again[0], recompute_layers=again[1])


class Candidates:
    """Legal strategies that use all devices, in a fixed order.

    *Shapes* (degrees, micro-batch) decide the work of a device; each has *cuts* (schedule, virtual stages, layers of each stage,
    ring attention), each cut *splits* (ZeRO's stage, copies of what it splits), each split what is *recomputed*, where memory asks
    for it.

    Degrees divide the devices. Sequence parallelism goes with tensor parallelism. ZeRO's stages 2 and 3 go without pipelines, whose
    micro-batches would each reduce all gradients. Uneven stages are those that `balanced` gives.

    Parameters
    ----------
    kept
        The strategy of today: what no search sets (dtype of gradients, load of experts, prefetching, CUDA graphs) is as there,
        and so is the overlap of experts' exchanges where it can be.
    balanced
        The layers of each stage, of a strategy, with which the busiest rank has least to do.
    """

    def __init__(self, fixed: Fixed, choices: Choices, kept: Strategy, balanced: Callable[[Strategy], tuple[int, ...]]) -> None:
        self._fixed, self.choices, self._balanced, self._overlaps = fixed, choices, balanced, kept.overlap_experts
        self._usual = Strategy(
            global_batch=fixed.global_batch,
            gradient_dtype=kept.gradient_dtype,
            expert_load=kept.expert_load,
            prefetch_layers=kept.prefetch_layers,
            cuda_graphs=kept.cuda_graphs,
        )

    def __iter__(self) -> Iterator[Strategy]:
        """All of them."""
        for shape in self.shapes():
            for cut in self.cuts(shape):
                for plain in self.splits(cut):
                    for split in (plain, *self.relaxed(plain)):
                        yield split
                        for again in self.recomputations(split):
                            yield recomputing(split, again)

    def drawn(self, rng: np.random.Generator) -> Iterator[Strategy]:
        """Strategies drawn at random without end: from each shape in turn, so that all degrees are among the first ones."""
        shapes = list(self.shapes())
        while shapes:
            for place in rng.permutation(len(shapes)).tolist():
                cuts = list(self.cuts(shapes[place]))
                splits = (
                    [split for plain in self.splits(_one_of(cuts, rng)) for split in (plain, *self.relaxed(plain))] if cuts else []
                )
                if splits:
                    split = _one_of(splits, rng)
                    options = [(Recompute.NONE, 0), *self.recomputations(split)]
                    kind = _one_of(list(dict.fromkeys(kind for kind, _ in options)), rng)
                    yield recomputing(split, _one_of([option for option in options if option[0] is kind], rng))

    def shapes(self) -> Iterator[Strategy]:
        """Degrees and micro-batches, with 1F1B and as many layers on each stage."""
        fixed = self._fixed
        for tp, pp, cp in _degrees(fixed, self.choices):
            dp = fixed.devices // (tp * pp * cp)
            replica_batch = fixed.global_batch // dp
            for micro_batch in _micro_batches(fixed, replica_batch):
                if fixed.global_batch % (dp * micro_batch):
                    continue
                for ep, etp in _experts(fixed, dp * cp * tp, tp):
                    shape = replace(
                        self._usual,
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=ep,
                        etp=etp,
                        sequence_parallel=tp > 1 and fixed.sequence % (2 * cp * tp) == 0,
                        micro_batch=micro_batch,
                    )
                    if self._legal(shape):
                        yield shape

    def cuts(self, shape: Strategy) -> Iterator[Strategy]:
        """Those of a shape."""
        for schedule, stages in self._schedules(shape):
            cut = replace(shape, schedule=schedule, virtual_stages=stages)
            if not self._legal(cut):
                continue
            cuts = [cut] if self._fixed.layer_count % (cut.pp * stages) == 0 or stages == 1 else []
            if self.choices.uneven_stages and cut.pp > 1:
                uneven = replace(cut, stage_layers=self._balanced(cut))
                if uneven.stage_layers and self._legal(uneven):
                    cuts.append(uneven)
            yield from cuts
            if shape.cp > 1 and self.choices.rings:
                yield from (replace(each, cp_ring=True) for each in cuts)

    def splits(self, cut: Strategy) -> Iterator[Strategy]:
        """ZeRO's stages of a cut, over all replicas; experts' exchanges are overlapped where they are today, and can be."""
        for split in filter(self._legal, (replace(cut, zero_stage=stage) for stage in self._zero_stages(cut))):
            overlapped = replace(split, overlap_experts=self._overlaps)
            yield overlapped if self._legal(overlapped) else split

    def leanest(self, shape: Strategy) -> Strategy | None:
        """A shape with the stage of ZeRO that needs least memory, and what can be on the host there; None: none is legal."""
        stage = max(self._zero_stages(shape), default=None)
        return None if stage is None else self.offloaded(replace(shape, zero_stage=stage))[-1]

    def offloaded(self, split: Strategy) -> Sequence[Strategy]:
        """A split that does not fit, and what else could, with more and more on the host."""
        variants = [split]
        for name in OFFLOADS:
            moved = replace(variants[-1], **dict[str, Any]({name: True}))
            if self._legal(moved):
                variants.append(moved)
        return variants

    def _zero_stages(self, shape: Strategy) -> list[int]:
        alone = shape.dp * shape.cp == 1
        return [each for each in self.choices.zero_stages if not ((each >= 2 and shape.pp > 1) or (each and alone))]

    def relaxed(self, split: Strategy) -> Iterator[Strategy]:
        """Variants of a split with more memory and less communication: ZeRO over fewer replicas, or parameters kept."""
        if not split.zero_stage:
            return
        if split.zero_stage == 3:
            yield replace(split, reshard=False)
        if self.choices.replicates:
            for copies in self._copies(split):
                yield replace(split, dp_replicate=copies)

    def recomputations(self, split: Strategy) -> Sequence[Recomputation]:
        """Recomputations that are possible for a split, the smallest first: the kind, and the number of layers of each stage."""
        most = max(split.stage_layers) if split.stage_layers else -(-self._fixed.layer_count // (split.pp * split.virtual_stages))
        recomputations: list[Recomputation] = []
        for recompute in self.choices.recompute:
            if split.overlap_experts and recompute is Recompute.FULL:  # see `check_strategy`
                continue
            if self.choices.recomputes_some and recompute is Recompute.FULL:
                recomputations += [(recompute, count) for count in range(1, most)]
            recomputations.append((recompute, 0))
        return recomputations

    def values(self) -> dict[str, set[Any]]:
        """Values of each setting in any of them, by the names of `Strategy`; layers of stages, which go with them, are left out."""
        values_of: dict[str, set[Any]] = defaultdict(set)
        pipelines: set[tuple[int, bool]] = set()
        for shape in self.shapes():
            for name in _OF_SHAPES:
                values_of[name].add(getattr(shape, name))
            values_of["dp_replicate"] |= {1, *(self._copies(shape) if self.choices.replicates else ())}
            pipeline = shape.pp, shape.micro_batches % shape.pp == 0
            if pipeline not in pipelines:
                pipelines.add(pipeline)
                for schedule, stages in self._schedules(shape):
                    values_of["schedule"].add(schedule.value)
                    values_of["virtual_stages"].add(stages)
        values_of["zero_stage"] |= {*self.choices.zero_stages}
        values_of["recompute"] |= {Recompute.NONE.value, *(recompute.value for recompute in self.choices.recompute)}
        for name in OPTIONS:
            values_of[name] |= {False, isinstance(self._fixed.options.get(name), int)}
        values_of["cp_ring"] |= {False, self.choices.rings}
        values_of["reshard"] |= {True, 3 not in self.choices.zero_stages}
        if self.choices.recomputes_some:
            values_of["recompute_layers"] |= {0, *_powers_of_two(self._fixed.layer_count // 2)}
        return values_of

    def _schedules(self, shape: Strategy) -> Iterator[tuple[Schedule, int]]:
        """Schedules, and numbers of virtual stages that they may have."""
        schedules = self.choices.schedules
        if shape.pp == 1:
            yield Schedule.ONE_F_ONE_B, 1
            return
        yield from ((each, 1) for each in (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE) if each in schedules)
        if Schedule.INTERLEAVED in schedules and shape.micro_batches % shape.pp == 0:
            yield from ((Schedule.INTERLEAVED, count) for count in self._virtual(shape.pp))
        yield from ((each, 2) for each in V_SHAPED if each in schedules and 2 * shape.pp <= self._fixed.layer_count)

    def _virtual(self, pp: int) -> Iterator[int]:
        """Numbers of virtual stages: those that cut the layers evenly, and powers of two where stages may be uneven."""
        layers = self._fixed.layer_count
        for count in range(2, min(MOST_VIRTUAL, layers // pp) + 1):
            if layers % (pp * count) == 0 or (self.choices.uneven_stages and count & (count - 1) == 0):
                yield count

    def _copies(self, split: Strategy) -> Iterator[int]:
        """Copies of what ZeRO splits: so many that each is on 1, 2, 4 ... hosts; none where all replicas are on one."""
        replicas = split.dp * split.cp
        inside = max(self.choices.ranks_per_host // split.tp, 1)  # ranks of a host that hold the same parameters
        ways = inside
        while 1 < ways < replicas:
            copies = replicas // ways
            if replicas % ways == 0 and split.expert_dp % copies == 0:
                yield copies
            ways *= 2

    def _legal(self, strategy: Strategy) -> bool:
        try:
            self._fixed.check_splits(strategy)
            check_strategy(strategy, self._fixed.model, self._fixed.sequence)
        except InputError:
            return False
        return True


def _one_of(options: Sequence[Option], rng: np.random.Generator) -> Option:
    return options[int(rng.integers(len(options)))]


def _degrees(fixed: Fixed, choices: Choices) -> Iterator[tuple[int, int, int]]:
    """Degrees (tp, pp, cp) whose product divides the devices."""
    if not fixed.layer_count and fixed.heads == 1 and not fixed.has_context:  # a network, which is split over replicas only
        yield 1, 1, 1
        return
    most_tp = MOST_HOSTS_OF_TP * choices.ranks_per_host
    for tp in _divisors(fixed.devices):
        if tp > most_tp or fixed.heads % tp:
            continue
        for pp in _divisors(fixed.devices // tp):
            if pp > max(fixed.layer_count, 1):
                break
            for cp in _divisors(fixed.devices // (tp * pp)):
                if cp > 1 and (not fixed.has_context or fixed.sequence // cp < LEAST_CONTEXT):
                    break
                if fixed.devices // (tp * pp * cp) <= fixed.global_batch:
                    yield tp, pp, cp


def _experts(fixed: Fixed, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Degrees (ep, etp) of experts on the ranks of a pipeline stage."""
    if not fixed.experts:
        yield 1, 1
        return
    for ep in _divisors(fixed.experts):
        for etp in sorted({1, tp}):
            if ranks % (ep * etp) == 0:
                yield ep, etp


def _micro_batches(fixed: Fixed, replica_batch: int) -> Iterator[int]:
    """Sizes of a micro-batch for a replica's part of the batch."""
    if isinstance(fixed.model, CapturedModel) and not fixed.micro_batches:
        yield from (size for size in (fixed.model.batch,) if size <= replica_batch)
    elif fixed.has_tokens:
        yield from _powers_of_two(min(MOST_MICRO_BATCH, replica_batch))
    else:
        yield from _divisors(replica_batch)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers_of_two(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2
