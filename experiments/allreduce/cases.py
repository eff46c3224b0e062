"""What the characterisation runs: one vector of the paper at a time is varied around a centre.

Scaling: 1 to 16 workers with ResNet-50. Batch: 1 to 8 images with 8 workers. Network: three, with 8 workers. MPI library: the hook
on Open MPI and on MPICH. Latency: one tensor of 4 B to 256 MiB, by workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

RATE_BPS = 5e8  # two cores move the bytes of 16 workers at this rate
WORKERS = (1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8)
BURSTS = (
    (256,) * 128,
    (1 << 16,) * 32,
    (1 << 20,) * 8,
)  # elements of tensors that are there at once: many small, fewer larger ones
SIZES_BYTES = tuple(4**power for power in range(1, 15))
BATCH, VARIED_WORKERS = 4, 8  # where others are varied
LONGEST_S = 20.0  # of an exchange
MOST_BYTES = 1 << 30
_LONGEST_CALLS_BYTES = 1 << 24  # larger tensors are exchanged once


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of a scheme; or, with no network, the latency of its exchanges by size."""

    scheme: str
    workers: int
    network: str = ""
    batch: int = 0
    rate_bps: float = RATE_BPS

    @property
    def one_server(self) -> bool:
        """Whether a tensor is on one server: then the workers share that one's link."""
        return self.scheme == "tf-ps"

    @property
    def key(self) -> str:
        """What it is called in a journal."""
        return " ".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))


def cases(scheme: str) -> list[Case]:
    """All of a scheme, by workers, the latency first: a smaller job finds what is broken."""
    found = []
    for workers in WORKERS:
        trainings = {("resnet-50", BATCH)}
        if workers == VARIED_WORKERS:
            trainings |= {("resnet-50", batch) for batch in BATCHES}
            trainings |= {(network, BATCH) for network in ("mobilenet", "nasnet-large")}
        if workers > 1:
            found.append(Case(scheme=scheme, workers=workers))
        found += [Case(scheme=scheme, workers=workers, network=network, batch=batch) for network, batch in sorted(trainings)]
    return found


def singles() -> list[tuple[str, int]]:
    """(network, batch) whose computation on one worker is recorded."""
    return sorted({(case.network, case.batch) for case in cases("") if case.network})


def sizes_of(case: Case) -> list[int]:
    """Sizes whose exchange takes no longer than `LONGEST_S`, if all of it goes to one server and back, or around a ring.

    All workers' tensors together fit into `MOST_BYTES`, for they share a machine's memory.
    """
    times = 2 * case.workers if case.one_server else 2
    return [size for size in SIZES_BYTES if size * times <= LONGEST_S * case.rate_bps / 8 and size * case.workers <= MOST_BYTES]


def calls(sizes_bytes: Sequence[int]) -> list[int]:
    """How often an exchange of each size is timed."""
    return [1 if not is_warm(size) else 3 if size > 1 << 20 else 20 for size in sizes_bytes]


def is_warm(size_bytes: float) -> bool:
    """Whether an exchange of a size is timed after one that is not: the first one also builds its graph and finds its memory."""
    return size_bytes <= _LONGEST_CALLS_BYTES
