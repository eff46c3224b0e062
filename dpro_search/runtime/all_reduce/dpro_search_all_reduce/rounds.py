"""Algorithms of all-reduces as lists of `Stage`: each rank's messages and additions. No MPI, no arrays.

A stage's messages are under way together; what is sent was final when the stage began. The counts are those of Thakur,
Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH" (2005):

==================  ============================================================  =====================
algorithm           what it does                                                  order of additions
==================  ============================================================  =====================
gather              every rank sends all it has to all others                     by rank
direct              every rank sums one part of the tensor, sends the sum to all  by rank
recursive-doubling  ranks at distances 1, 2, 4 ... exchange what they have        the same in all parts
halving-doubling    likewise with half, a quarter ... of the tensor, and back     differs between parts
ring                parts travel around a ring, added up, and around it again     differs between parts
hierarchy           "direct" within hosts, around "halving-doubling" among hosts  differs between parts
==================  ============================================================  =====================

Every rank ends with the same bits. A sum "by rank" has the same bits for every algorithm that makes it.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

ADD, COPY, SUM_BY_RANK = "add", "copy", "sum by rank"
IN_RANK_ORDER = ("gather", "direct")
ALGORITHMS = ("gather", "direct", "recursive-doubling", "halving-doubling", "ring", "hierarchy")


class Message(NamedTuple):
    """Elements ``start`` to ``stop`` of the tensor, to or from a rank."""

    peer: int
    start: int
    stop: int


class Stage(NamedTuple):
    """Messages of one rank that are under way together.

    Attributes
    ----------
    receives
        Of what `combine` says: "add" each to the tensor when it comes, "copy" it there, or keep all until the last has come and
        sum them with the rank's own, rank by rank ("sum by rank"; then all are of the same elements).
    """

    sends: Tuple[Message, ...]
    receives: Tuple[Message, ...]
    combine: str


def stages(algorithm: str, rank: int, hosts: Sequence[Sequence[int]], count: int) -> List[Stage]:
    """Stages of a rank in an all-reduce; those without a message are left out.

    Parameters
    ----------
    hosts
        The ranks of each host; all ranks of the job, from 0 on, stand in them once. Only "hierarchy" looks at who shares a host.
    count
        Elements of the tensor.

    Raises
    ------
    ValueError
        The algorithm is not known, or hosts of a hierarchy have different numbers of ranks.
    """
    ranks = sorted(one for host in hosts for one in host)
    whole = (0, count)
    if algorithm == "gather":
        planned = [_to_all(rank, ranks, whole)]
    elif algorithm == "direct":
        planned = _direct(rank, ranks, whole)
    elif algorithm == "recursive-doubling":
        planned = _recursive(rank, ranks, whole, _doubling)
    elif algorithm == "halving-doubling":
        planned = _recursive(rank, ranks, whole, _halving)
    elif algorithm == "ring":
        planned = _ring(rank, ranks, whole)
    elif algorithm == "hierarchy":
        planned = _hierarchy(rank, hosts, whole)
    else:
        raise ValueError("all-reduce algorithm %r is unknown (known: %s)" % (algorithm, ", ".join(ALGORITHMS)))
    return [stage for stage in map(_without_empty, planned) if stage.sends or stage.receives]


def parts(span: Tuple[int, int], number: int) -> List[Tuple[int, int]]:
    """A span of elements in so many parts, whose lengths differ by one at most."""
    start, length = span[0], span[1] - span[0]
    edges = [start + length * i // number for i in range(number + 1)]
    return [(edges[i], edges[i + 1]) for i in range(number)]


def _without_empty(stage: Stage) -> Stage:
    sends = tuple(one for one in stage.sends if one.stop > one.start)
    receives = tuple(one for one in stage.receives if one.stop > one.start)
    return Stage(sends, receives, stage.combine)


def _to_all(rank: int, ranks: Sequence[int], span: Tuple[int, int]) -> Stage:
    others = [one for one in ranks if one != rank]
    messages = tuple(Message(one, *span) for one in others)
    return Stage(messages, messages, SUM_BY_RANK)


def _direct(rank: int, ranks: Sequence[int], span: Tuple[int, int]) -> List[Stage]:
    return [_scatter_direct(rank, ranks, span), _gather_direct(rank, ranks, span)]


def _scatter_direct(rank: int, ranks: Sequence[int], span: Tuple[int, int]) -> Stage:
    """Every rank of a group gets all of one part, and sums it."""
    part_of = dict(zip(ranks, parts(span, len(ranks))))
    others = _after(rank, ranks)
    return Stage(
        tuple(Message(one, *part_of[one]) for one in others),
        tuple(Message(one, *part_of[rank]) for one in reversed(others)),
        SUM_BY_RANK,
    )


def _gather_direct(rank: int, ranks: Sequence[int], span: Tuple[int, int]) -> Stage:
    """Every rank of a group sends its part to all others."""
    part_of = dict(zip(ranks, parts(span, len(ranks))))
    others = _after(rank, ranks)
    return Stage(
        tuple(Message(one, *part_of[rank]) for one in others), tuple(Message(one, *part_of[one]) for one in reversed(others)), COPY
    )


def _after(rank: int, ranks: Sequence[int]) -> List[int]:
    """The others, beginning with the next: so that not all send to the same one first."""
    here = ranks.index(rank)
    return [*ranks[here + 1 :], *ranks[:here]]


def _ring(rank: int, ranks: Sequence[int], span: Tuple[int, int]) -> List[Stage]:
    size, here = len(ranks), ranks.index(rank)
    following, before = ranks[(here + 1) % size], ranks[(here - 1) % size]
    spans = parts(span, size)
    planned = []
    for step in range(2 * (size - 1)):
        sent, got = spans[(here - step) % size], spans[(here - step - 1) % size]
        combine = ADD if step < size - 1 else COPY
        planned.append(Stage((Message(following, *sent),), (Message(before, *got),), combine))
    return planned


def _recursive(rank: int, ranks: Sequence[int], span: Tuple[int, int], between) -> List[Stage]:
    """`between` among a power of two of the ranks; each one beyond gives what it has to a neighbour, and gets the sum from it."""
    size, here = len(ranks), ranks.index(rank)
    within = 1 << (size.bit_length() - 1)
    beyond = size - within
    if here < 2 * beyond:
        pair = ranks[here ^ 1]
        if here % 2 == 0:
            whole = (Message(pair, *span),)
            return [Stage(whole, (), ADD), Stage((), whole, COPY)]
    taking_part = [ranks[2 * i + 1] if i < beyond else ranks[i + beyond] for i in range(within)]
    planned = between(taking_part.index(rank), taking_part, span)
    if here < 2 * beyond:
        whole = (Message(pair, *span),)
        return [Stage((), whole, ADD), *planned, Stage(whole, (), COPY)]
    return planned


def _doubling(here: int, ranks: Sequence[int], span: Tuple[int, int]) -> List[Stage]:
    planned = []
    reach = 1
    while reach < len(ranks):
        message = (Message(ranks[here ^ reach], *span),)
        planned.append(Stage(message, message, ADD))
        reach *= 2
    return planned


def _halving(here: int, ranks: Sequence[int], span: Tuple[int, int]) -> List[Stage]:
    """Half of the tensor to the farthest rank, a quarter to the next ...; then back the same way."""
    down, back = [], []
    reach = len(ranks) // 2
    while reach:
        low, high = parts(span, 2)
        kept, given = (low, high) if here & reach == 0 else (high, low)
        peer = ranks[here ^ reach]
        down.append(Stage((Message(peer, *given),), (Message(peer, *kept),), ADD))
        back.append(Stage((Message(peer, *kept),), (Message(peer, *given),), COPY))
        span = kept
        reach //= 2
    return [*down, *reversed(back)]


def _hierarchy(rank: int, hosts: Sequence[Sequence[int]], span: Tuple[int, int]) -> List[Stage]:
    sizes = {len(host) for host in hosts}
    if len(sizes) > 1:
        raise ValueError("a hierarchy needs the same number of ranks on every host, not %s" % sorted(sizes))
    host = next(sorted(one) for one in hosts if rank in one)
    place = host.index(rank)
    among = [sorted(one)[place] for one in hosts]
    part = parts(span, len(host))[place]
    return [
        _scatter_direct(rank, host, span),
        *_recursive(rank, among, part, _halving),
        _gather_direct(rank, host, span),
    ]


def receives_from(some_stages: Sequence[Stage]) -> Optional[int]:
    """The most elements that a stage receives into memory of its own; None: none does."""
    return max((sum(m.stop - m.start for m in one.receives) for one in some_stages if one.combine != COPY), default=None)
