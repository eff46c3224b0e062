"""Watching the stamps of a job: fed with new records, it keeps the answer to which rank makes the others wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.analysis.ranks.answer import Finding, Parting, RanksAnswer, RankShares
from dpro_search.analysis.ranks.clocks import Clocks
from dpro_search.analysis.ranks.links import Links
from dpro_search.analysis.ranks.parting import parting_of, parting_of_counts
from dpro_search.analysis.ranks.peers import has_small_classes, median_of, peer_classes, peer_excess_us
from dpro_search.analysis.ranks.replay import step_gain_us
from dpro_search.analysis.ranks.sequential import Exceedance, Excess
from dpro_search.analysis.ranks.steps import Floats, StepMeasures, measured
from dpro_search.collect.readers.stamps import RECORD, RankStamps, StampFolder, flight_recorder, nccl_inspector, nccl_ras
from dpro_search.collect.readers.stamps.records import STEP, Records

LEAST_SHARE = 0.02  # of a step: the least lateness worth naming
_BLOCK_STEPS = 256
_HISTORY_STEPS = 64
_LEAST_USUAL, _LONGER = 20, 1.05
_REPLAYED_STEPS = 16
_READ_RECORDS = 4096
_SILENT_S = 10.0  # a job that stamped nothing for so long has ended or hangs


class Watch:
    """Takes new records of all ranks as they come.

    Attributes
    ----------
    changes
        Each step after which the findings changed, with what they were then: (kind, ranks) of each.
    """

    def __init__(self, since: int = 0) -> None:
        self._since = since
        self._stamps: list[RankStamps] = []
        self._begins_ns: list[int] = []
        self._tests: dict[str, Exceedance] = {}
        self._links: Links | None = None
        self._classes: tuple[tuple[int, ...], ...] = ()
        self._measured: dict[str, Floats] = {}
        self._usual_us: dict[str, Floats] = {}
        self._usual_ended_us: list[float] = []  # of collectives, mean over ranks, in steps without a slow link
        self._clocks: Clocks | None = None
        self._recent: list[StepMeasures] = []
        self._replayed: tuple[list[RankStamps], np.ndarray] | None = None
        self._last: list[Records] = []
        self._steps, self._step = 0, -1
        self._numbers: list[int] = []  # of the steps
        self.changes: list[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]] = []

    def feed(self, stamps: Sequence[RankStamps]) -> None:
        """Take new records, one `RankStamps` a rank, always the same ranks in the same order."""
        if not self._stamps:
            self._stamps = [_with(each, each.records) for each in stamps]
            self._last = [np.empty(0, RECORD)] * len(stamps)
        else:
            self._stamps = [
                _with(new, np.concatenate([old.records, new.records]) if len(new.records) else old.records)
                for old, new in zip(self._stamps, stamps, strict=True)
            ]
        self._last = [
            np.concatenate([last, new.records[-_HISTORY_STEPS * 8 :]])[-_HISTORY_STEPS * 8 :]
            for last, new in zip(self._last, stamps, strict=True)
        ]
        while self._take_block():
            pass

    def parting(self) -> Parting | None:
        """The collective up to which all ranks went together, if the job has ended or hangs; None: they did not part."""
        return parting_of([_with(each, last) for each, last in zip(self._stamps, self._last, strict=True)])

    def answer(self, *, silent: bool = False) -> RanksAnswer:
        """The answer as of the last step that all ranks completed; `silent`: the job stamps nothing any more."""
        parting = self.parting() if silent and self._stamps else None
        recent = self._recent[-1] if self._recent else None
        return RanksAnswer(
            step=self._step,
            steps=self._steps,
            step_us=float(np.median(recent.length_us[-_HISTORY_STEPS:])) if recent is not None else 0.0,
            findings=() if parting is not None or recent is None else self._findings(with_gain=True),
            parting=parting,
            ranks=() if recent is None else self._times(recent),
            notes=tuple(self._clocks.notes) if self._clocks is not None else (),
        )

    def _take_block(self) -> bool:
        """Look at the next steps that all ranks completed, at most `_BLOCK_STEPS` of them."""
        if any(not len(each.records) for each in self._stamps):
            return False
        if not self._begins_ns:
            return self._skip_first_step()
        ends = [each.records[each.records["operation"] == STEP]["step"] for each in self._stamps]
        if any(not len(each) for each in ends):
            return False
        first = min(int(each[0]) for each in ends)
        last = min(min(int(each[-1]) for each in ends), first + _BLOCK_STEPS - 1)
        cuts = [int(np.searchsorted(each.records["step"], last, side="right")) for each in self._stamps]
        block = [_with(each, each.records[:cut]) for each, cut in zip(self._stamps, cuts, strict=True)]
        self._stamps = [_with(each, each.records[cut:]) for each, cut in zip(self._stamps, cuts, strict=True)]
        steps = np.unique(ends[0][ends[0] <= last]).astype(np.int64)
        if self._clocks is None:
            self._prepare(block)
        assert self._clocks is not None
        begins_ns = np.array(self._begins_ns, np.int64)
        offsets_ns = self._clocks.offsets_ns(block, steps)
        measures = measured(block, offsets_ns, begins_ns, steps)
        self._replayed = block, begins_ns
        self._begins_ns = [int(each.records["enqueue_ns"][each.records["operation"] == STEP][-1]) for each in block]
        self._test(measures)
        return True

    def _skip_first_step(self) -> bool:
        """Leave out the first step, which has no known begin."""
        marks = [np.flatnonzero(each.records["operation"] == STEP) for each in self._stamps]
        if any(not len(each) for each in marks):
            return False
        first = max(int(each.records["step"][rows[0]]) for each, rows in zip(self._stamps, marks, strict=True))
        kept = []
        for each, rows in zip(self._stamps, marks, strict=True):
            row = next((int(row) for row in rows if int(each.records["step"][row]) >= first), None)
            if row is None:
                return False
            self._begins_ns.append(int(each.records["enqueue_ns"][row]))
            kept.append(_with(each, each.records[row + 1 :]))
        self._stamps = kept
        return True

    def _prepare(self, block: Sequence[RankStamps]) -> None:
        self._clocks = Clocks(block)
        self._links = Links.of([each.host for each in block])
        self._classes = peer_classes(block)
        ranks = len(block)
        self._tests = {kind: Exceedance(ranks, LEAST_SHARE) for kind in ("compute", "input")}
        self._tests |= {kind: Exceedance(len(self._links.units), LEAST_SHARE, one_of_all=True) for kind in ("ring", "message")}
        columns = {"compute": ranks, "input": ranks, "ring": len(self._links.units), "message": len(self._links.units)}
        self._measured = {kind: np.zeros((0, count)) for kind, count in columns.items()}

    def _test(self, measures: StepMeasures) -> None:
        assert self._links is not None
        self._recent = [*self._recent[-1:], measures]
        hosts = [each.host for each in self._stamps]
        ring_us = self._links.ring_excess_us(measures.ended_us)
        ended_us = np.nansum(measures.ended_us, axis=0).mean(axis=1)
        message_us = self._links.message_excess_us(measures.edges, [each.rank for each in self._stamps], len(measures.steps))
        for row, step in enumerate(measures.steps.tolist()):
            length_us = float(measures.length_us[row])
            for kind, own_us in (("compute", measures.compute_us[row]), ("input", measures.input_us[row])):
                usual_us = self._usual(kind) if has_small_classes(self._classes) else None
                excess_us = peer_excess_us(own_us, self._classes, hosts, usual_us)
                self._push(kind, own_us, excess_us / length_us, length_us)
            ring_us[row] = np.where(self._is_longer(float(ended_us[row])), ring_us[row], np.minimum(ring_us[row], 0.0))
            for kind, behind_us in (("ring", ring_us[row]), ("message", message_us[row])):
                usual_us = self._usual(kind)
                # Stages of a pipeline differ for good, neighbours in a ring do not.
                usual_us = np.where(np.isnan(usual_us), 0.0 if kind == "ring" else behind_us, usual_us)
                self._push(kind, behind_us, (behind_us - usual_us) / length_us, length_us)
            self._step, self._steps = step, self._steps + 1
            self._numbers.append(step)
            slow = any(test.active.any() for test in self._tests.values())
            findings = tuple(sorted((each.kind, each.ranks) for each in self._findings(with_gain=False))) if slow else ()
            if findings != (self.changes[-1][1] if self.changes else ()):
                self.changes.append((step, findings))

    def _usual(self, kind: str) -> Floats:
        """Median of a measure over the last steps in which its column was not slow, [C]; NaN: not known; taken every 4th step."""
        if self._steps % 4 == 0 or kind not in self._usual_us:
            values = self._measured[kind]
            self._usual_us[kind] = median_of(np.where(self._tests[kind].clean, values, np.nan) if len(values) else values)
        return self._usual_us[kind]

    def _is_longer(self, ended_us: float) -> bool:
        """Whether collectives take longer in this step than usual: a slow link makes them so, chance among neighbours does not."""
        usual = self._usual_ended_us
        longer = len(usual) < _LEAST_USUAL or ended_us > _LONGER * float(np.median(usual))
        if not self._tests["ring"].active.any():
            self._usual_ended_us = [*usual[1 - _HISTORY_STEPS :], ended_us]
        return longer

    def _push(self, kind: str, measured_us: Floats, excess: Floats, length_us: float) -> None:
        self._tests[kind].push(excess, length_us)
        self._measured[kind] = np.vstack([self._measured[kind], measured_us])[-_HISTORY_STEPS:]

    def _findings(self, *, with_gain: bool) -> tuple[Finding, ...]:
        findings = []
        compute = {each.column: each for each in self._tests["compute"].named()}
        hosts = [each.host for each in self._stamps]
        of_host = Counter(hosts)
        whole = {
            host
            for host, count in of_host.items()
            if 1 < count < len(hosts) and sum(hosts[place] == host and each.steady for place, each in compute.items()) == count
        }
        for host in sorted(whole):
            places = tuple(place for place, name in enumerate(hosts) if name == host)
            slowest = max((compute[place] for place in places), key=lambda each: float(each.values.mean()))
            findings.append(self._finding("host", places, slowest, with_gain))
        for kind in ("compute", "input"):
            for each in self._tests[kind].named():
                if kind == "compute" and each.steady and hosts[each.column] in whole:
                    continue
                findings.append(self._finding(kind if each.steady else "jitter", (each.column,), each, with_gain))
        for each in [*self._tests["ring"].named(), *self._tests["message"].named()]:
            assert self._links is not None
            findings.append(self._finding("link", self._links.units[each.column], each, with_gain))
        steady = {each.ranks for each in findings if each.kind in ("compute", "input")}
        findings = [each for each in findings if each.kind != "jitter" or each.ranks not in steady]  # not told apart beside it
        once = {(each.kind, each.ranks): each for each in findings}
        return tuple(sorted(once.values(), key=lambda each: -each.by_us))

    def _finding(self, kind: str, places: tuple[int, ...], excess: Excess, with_gain: bool) -> Finding:
        excess_us = excess.values * excess.lengths_us
        by_us = float(excess_us.mean())
        error_us = 1.96 * float(excess_us.std(ddof=1)) / len(excess_us) ** 0.5 if len(excess_us) > 1 else by_us
        since = self._numbers[-min(excess.steps_ago, len(self._numbers))]
        return Finding(
            kind=kind,
            ranks=tuple(self._stamps[place].rank for place in places),
            host=self._stamps[places[0]].host,
            since_step=since,
            since_wall_ns=self._wall_ns(since),
            by_us=by_us,
            by_interval_us=(by_us - error_us, by_us + error_us),
            gain_us=self._gain_us(kind, places, excess) if with_gain else None,
            false_alarm=excess.false_alarm,
        )

    def _gain_us(self, kind: str, places: tuple[int, ...], excess: Excess) -> float | None:
        """Mean gain over the last steps, replayed; None for links, whose time without the fault is not known."""
        if kind == "link" or self._replayed is None:
            return None
        block, begins_ns = self._replayed
        assert self._clocks is not None
        measures = self._recent[-1]
        rows = np.arange(max(len(measures.steps) - min(_REPLAYED_STEPS, excess.steps_ago), 0), len(measures.steps))
        less_us = np.zeros((len(measures.steps), len(block)))
        for place in places:
            values = excess.values[-len(rows) :] if len(places) == 1 else np.full(len(rows), excess.values.mean())
            less_us[rows[-len(values) :], place] = np.maximum(values, 0) * measures.length_us[rows[-len(values) :]]
        return step_gain_us(block, begins_ns, measures.steps, less_us, is_input=kind == "input")

    def _wall_ns(self, step: int) -> int:
        for measures in self._recent:
            place = np.flatnonzero(measures.steps == step)
            if len(place):
                return int(measures.end_ns[place[0]]) + self._stamps[0].wall_less_clock_ns
        return 0

    def _times(self, recent: StepMeasures) -> tuple[RankShares, ...]:
        part = slice(-_HISTORY_STEPS, None)
        matched = max(int(recent.collectives[part].sum()), 1)
        return tuple(
            RankShares(
                rank=each.rank,
                host=each.host,
                input_us=float(recent.input_us[part, place].mean()),
                compute_us=float(recent.compute_us[part, place].mean()),
                waited_us=float(recent.waited_us[part, place].mean()),
                last_pct=float(recent.last[part, place].sum()) / matched * 100,
            )
            for place, each in enumerate(self._stamps)
        )


def _with(stamps: RankStamps, records: Records) -> RankStamps:
    return replace(stamps, records=records)


def ranks(source: Path | str | Sequence[RankStamps], *, since: int = 0) -> RanksAnswer:
    """Name the rank, host or link that makes the others wait.

    Parameters
    ----------
    source
        A folder of stamps or of verbose logs of NCCL's inspector; a folder of JSON dumps of PyTorch's flight recorder, or reports
        of NCCL's RAS, which tell where ranks part; or the stamps themselves.
    since
        First step that is looked at.

    Raises
    ------
    InputError
        The folder has no stamps, or a file cannot be read.
    TraceFormatError
        A file is none of stamps.
    """
    watch = Watch()
    if not isinstance(source, (str, Path)):
        watch.feed(source)
        return watch.answer(silent=True)
    if reports := nccl_ras.recognise(Path(source)):
        return _answer_of_counts(nccl_ras.read(reports))
    for reader in (nccl_inspector, flight_recorder):
        if files := reader.recognise(Path(source)):
            watch.feed(_from_step(reader.read(files), since))
            return watch.answer(silent=reader is flight_recorder)  # the inspector logs what has ended: all ranks have as many
    folder = StampFolder(path=Path(source))
    while feed_from(watch, folder, since):
        pass
    answer = watch.answer(silent=is_silent(folder))
    missing = folder.missing
    if missing:
        named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        note = f"no stamps of {'rank' if len(missing) == 1 else 'ranks'} {named}: collectives with them are not matched"
        answer = msgspec.structs.replace(answer, notes=(*answer.notes, note))
    return answer


def _from_step(stamps: Sequence[RankStamps], since: int) -> list[RankStamps]:
    return [_with(each, each.records[each.records["step"] >= since]) for each in stamps]


def _answer_of_counts(reports: Sequence[nccl_ras.RasReport]) -> RanksAnswer:
    """The answer of NCCL's RAS, which knows no steps and no times."""
    parting = parting_of_counts(reports)
    if parting is None:
        note = "all ranks called as many collectives: they do not part; which one is slow needs times (CollectiveStamps)"
    elif len(reports) == 1:
        note = "of a job that runs ranks are a few calls apart for moments: take a second report some seconds later, and give both"
    else:
        note = ""
    return RanksAnswer(step=-1, steps=0, step_us=0.0, findings=(), parting=parting, ranks=(), notes=(note,) if note else ())


def feed_from(watch: Watch, folder: StampFolder, since: int = 0) -> bool:
    """Feed the next window of records of a folder; returns whether there were any."""
    stamps, fed = [], False
    for file in folder.files:
        records = file.peek(_READ_RECORDS)
        file.take(len(records))
        fed |= len(records) > 0
        stamps.append(file.stamps(records[records["step"] >= since]))
    watch.feed(stamps)
    return fed


def is_silent(folder: StampFolder) -> bool:
    """Whether no rank has written for a while."""
    newest = max(file.path.stat().st_mtime for file in folder.files)
    return time.time() - newest > _SILENT_S
