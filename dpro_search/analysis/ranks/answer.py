"""The answer to "which rank makes the others wait?", as values and as sentences."""

from __future__ import annotations

import msgspec

KINDS = {
    "compute": "computes longer than its peers",
    "input": "begins its forward pass late: it waits for input",
    "host": "has ranks that all compute longer than those of other hosts",
    "link": "sends or receives slower than the others",
    "jitter": "is late in some steps and not in others",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of waiting.

    Attributes
    ----------
    kind
        A key of `KINDS`.
    ranks
        The ranks concerned: one, or all of a host.
    host
        Their host.
    since_step, since_wall_ns
        The step in which it began, and that step's end in ns since 1970 on the clock of the first rank (0: unknown).
    by_us
        Time that it adds to the concerned ranks' own time or transfers in a step: the mean since it began.
    by_interval_us
        95 % interval of that mean.
    gain_us
        What a step would be shorter without it: the steps since then, replayed. None: not known.
    false_alarm
        Upper bound of the probability that ranks that are all alike show as much in one window.
    """

    kind: str
    ranks: tuple[int, ...]
    host: str
    since_step: int
    since_wall_ns: int
    by_us: float
    by_interval_us: tuple[float, float]
    gain_us: float | None
    false_alarm: float

    def sentence(self, step_us: float) -> str:
        """The finding as one sentence; `step_us` is the length of a step."""
        who = f"rank {self.ranks[0]} ({self.host})" if self.kind != "host" and len(self.ranks) == 1 else f"host {self.host}"
        gain = "" if self.gain_us is None else f"; a step without it would take {self.gain_us / 1e3:.3g} ms less"
        low, high = self.by_interval_us
        return (
            f"{who} {KINDS[self.kind]} since step {self.since_step}, by {self.by_us / 1e3:.3g} ms a step "
            f"({low / 1e3:.3g} to {high / 1e3:.3g}; {self.by_us / step_us:.0%} of a step){gain}"
        )


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """The collective up to which all ranks of a group went together.

    Attributes
    ----------
    group
        Name of the process group.
    sequence
        Number of the first collective in the group that not all ranks enqueued, or that they enqueued differently.
    behind
        Ranks that did not enqueue it; empty if the operations differ.
    last
        For each rank of the group (by its number): the last operation that it enqueued there, and its sequence number.
    """

    group: str
    sequence: int
    behind: tuple[int, ...]
    last: dict[int, tuple[str, int]]

    def sentence(self) -> str:
        """The parting as one sentence."""
        if not self.behind:
            return f"ranks issue different operations as collective {self.sequence} of group {self.group}: {self._operations()}"
        names = ", ".join(map(str, self.behind[:8])) + (", ..." if len(self.behind) > 8 else "")
        return (
            f"ranks part at collective {self.sequence} of group {self.group}: "
            f"{'rank' if len(self.behind) == 1 else 'ranks'} {names} never enqueued it; {self._operations()}"
        )

    def _operations(self) -> str:
        shown = list(self.last.items())[:8]
        return "last " + ", ".join(f"rank {rank}: {name} {number}" for rank, (name, number) in shown)


class RankShares(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over the steps that were looked at last, in us a step."""

    rank: int
    host: str
    input_us: float
    compute_us: float
    waited_us: float
    last_pct: float  # Collectives at which this rank arrived last.


class RanksAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank, host or link makes the others wait.

    Attributes
    ----------
    step
        The last step that was looked at; -1 before the first.
    steps
        Number of steps that were looked at.
    step_us
        Median length of the last steps.
    findings
        Causes that last until `step`; empty: no rank is slow.
    parting
        Where ranks part, which is how a hang looks; then there are no findings.
    notes
        What limits the answer: missing ranks, clocks that jumped.
    """

    step: int
    steps: int
    step_us: float
    findings: tuple[Finding, ...]
    parting: Parting | None
    ranks: tuple[RankShares, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The answer in sentences."""
        if self.parting is not None:
            return [self.parting.sentence(), *self.notes]
        if self.step < 0 and self.notes:
            return list(self.notes)
        if self.step < 0:
            return ["no step that all ranks completed was seen yet", *self.notes]
        sentences = [finding.sentence(self.step_us) for finding in self.findings]
        return [*(sentences or [f"no rank is slow (steps up to {self.step}, {self.step_us / 1e3:.3g} ms each)"]), *self.notes]
