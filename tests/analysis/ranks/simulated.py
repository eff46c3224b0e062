"""Stamps of a simulated data-parallel job: compute with noise, four all-reduces in the backward pass, one optimizer step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from dpro_search.collect.readers.stamps import RECORD, RankStamps, StampedGroup

OPERATIONS = ("none", "step", "forward", "update", "allreduce_", "send", "recv_")
BUCKETS = 4


def never(step: int, rank: int) -> float:
    """No extra time."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A job of ranks with equal work; extra times are in us.

    Attributes
    ----------
    compute_extra, input_extra
        Extra time of a rank in a step.
    link_extra
        By how much later a rank's all-reduces end in a step, of those ranks that receive over a slow link.
    clock_ahead_ns
        What a rank's clock is ahead in a step.
    """

    ranks: int = 8
    ranks_of_host: int = 2
    steps: int = 60
    compute_us: float = 40_000.0
    input_us: float = 1_000.0
    transfer_us: float = 2_000.0
    noise: float = 0.01
    seed: int = 0
    one_clock: bool = True
    compute_extra: Callable[[int, int], float] = never
    input_extra: Callable[[int, int], float] = never
    link_extra: Callable[[int, int], float] = never
    clock_ahead_ns: Callable[[int, int], float] = never
    last_collective: dict[int, int] = field(default_factory=dict)  # of ranks that stop after so many collectives

    def stamps(self) -> list[RankStamps]:
        """Stamps as the ranks would write them."""
        draws = np.random.default_rng(self.seed)
        rows: list[list[tuple[float, ...]]] = [[] for _ in range(self.ranks)]
        ready_us = np.zeros(self.ranks)
        for step in range(self.steps):
            ready_us = self._step(step, ready_us, rows, draws)
        group = StampedGroup(name="0", ranks=tuple(range(self.ranks)), backend="gloo")
        return [
            RankStamps(
                rank=rank,
                world=self.ranks,
                host=f"h{rank // self.ranks_of_host}",
                clock="one" if self.one_clock else f"h{rank // self.ranks_of_host}",
                wall_less_clock_ns=0,
                operations=OPERATIONS,
                groups={0: group},
                records=np.array(rows[rank], RECORD),
            )
            for rank in range(self.ranks)
        ]

    def _step(self, step: int, ready_us: np.ndarray, rows: list[list[tuple[float, ...]]], draws: np.random.Generator) -> np.ndarray:
        everyone = range(self.ranks)
        extra = np.array([self.input_extra(step, rank) for rank in everyone])
        forward_us = ready_us + self.input_us * self._noise(draws) + extra
        extra = np.array([self.compute_extra(step, rank) for rank in everyone])
        compute_us = self.compute_us * self._noise(draws) + extra
        end_us = np.zeros(self.ranks)
        enqueues, ends = [], []
        for bucket in range(BUCKETS):
            enqueues.append(forward_us + compute_us * (0.4 + 0.6 * (bucket + 1) / BUCKETS))
            end_us = np.maximum(enqueues[-1].max(), end_us) + self.transfer_us * draws.normal(1.0, 0.05)
            end_us = end_us + np.array([self.link_extra(step, rank) for rank in everyone])
            ends.append(end_us)
        update_us = end_us + 100.0
        done_us = update_us + 500.0 * self._noise(draws)
        for rank in everyone:
            ahead_us = self.clock_ahead_ns(step, rank) / 1e3
            self._add(rows[rank], forward_us[rank] + ahead_us, 2, step)
            for bucket in range(BUCKETS):
                number = step * BUCKETS + bucket
                if number <= self.last_collective.get(rank, number):
                    at_us = enqueues[bucket][rank] + ahead_us
                    self._add(rows[rank], at_us, 4, step, ends[bucket][rank] - enqueues[bucket][rank], number)
            if step * BUCKETS + BUCKETS - 1 <= min(self.last_collective.values(), default=self.steps * BUCKETS):
                self._add(rows[rank], update_us[rank] + ahead_us, 3, step)
                self._add(rows[rank], done_us[rank] + ahead_us, 1, step)
        return done_us

    def _noise(self, draws: np.random.Generator) -> np.ndarray:
        return np.maximum(draws.normal(1.0, self.noise, self.ranks), 0.5)

    def _add(
        self, rows: list[tuple[float, ...]], at_us: float, operation: int, step: int, ended_us: float = np.nan, number: int = 0
    ) -> None:
        size_bytes = 4 << 20 if operation >= 4 else 0
        at_ns = int(at_us * 1e3) + 1_000_000_000
        rows.append((at_ns, np.nan, ended_us, np.nan, np.nan, number, step, size_bytes, 0, operation, 0, -1, 0))


def write(stamps: list[RankStamps], folder: Path) -> None:
    """Files as the ranks write them."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in stamps:
        header = {"dpro_search_stamps": 1, "rank": each.rank, "world": each.world, "host": each.host, "boot": each.clock}
        header |= {"record_bytes": RECORD.itemsize, "operations": list(each.operations)}
        path = folder / f"rank-{each.rank:05d}.stamps"
        path.write_bytes(json.dumps(header).encode().ljust(4095) + b"\n" + each.records.tobytes())
        groups = [{"group": number, **asdict(group)} for number, group in each.groups.items()]
        path.with_suffix(".groups").write_text("".join(json.dumps(group) + "\n" for group in groups))
