"""`read_training_log`: step times, memory and batch from the log that a training program printed.

=================  ==========================================================================================================
program            lines, and where their format is written
=================  ==========================================================================================================
Megatron-LM        ``iteration 10/ 1000 | ... | elapsed time per iteration (ms): 1147.6 | ... | global batch size: 16 |``, and
                   ``[Rank 0] (after 10 iterations) memory (MB) | ... | max reserved: 71234.0`` with MB of 2^20 bytes
                   (``megatron/training/training.py``, `training_log`; ``megatron/training/utils.py``, `report_memory`)
NeMo               ``global_step: 3 | ... | train_step_timing in s: 1.505``, also as a progress bar or JSON with the same names
                   (``nemo/lightning/pytorch/callbacks``: the progress printer; the DLLogger of NVIDIA's training recipes)
MaxText            ``completed step: 4, seconds: 1.182, TFLOP/s/device: 167.154, Tokens/s/device: 3464.384, loss: 10.187``
                   (``src/MaxText/metric_logger.py``; its page "Understand logs and metrics")
torchtitan         ``step: 10  loss:  9.3421  memory: 48.91GiB(51.52%)  tps: 21,734  tflops: ...``: the most memory that was
                   reserved, and tokens a second and device (``torchtitan/components/metrics.py``, `MetricsProcessor.log`)
DeepSpeed          ``global_step=10, RunningAvgSamplesPerSec=25.0, CurrSamplesPerSec=25.7, MemAllocated=4.32GB,
                   MaxMemAllocated=38.49GB`` with GB of 2^30 bytes and samples of the whole job (``deepspeed/utils/timer.py``);
                   pipelines print ``steps: 10 loss: 0.05 iter time (s): 0.936`` (``deepspeed/runtime/pipe/engine.py``)
HF Trainer         its progress bar, ``5%|5   | 10/200 [00:50<15:50,  5.00s/it]`` (tqdm, ``transformers/trainer_callback.py``);
                   without one the mean of all steps, ``'train_steps_per_second': 6.81`` (``trainer_utils.py``)
=================  ==========================================================================================================

**Steps that are left out.** A program's first steps compile, allocate and fill caches. Of each start of the program the first
reading is left out, and those after it until one is at most 15 % above the median of the second half of that start's readings. A
training that was restarted has several starts: its step numbers fall back.

Colours are removed. Lines that a terminal wrapped are joined. Lines of several ranks are told apart by the label that launchers put
before them (``[rank3]:``, ``[default3]:``, ``3:``); unlabelled ones of equal steps count together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from dpro_search._regular_files import open_regular
from dpro_search._text import listed
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError

FEWEST_STEPS = 3
_WARM = 1.15  # Time of a warm reading over the median of the second half of its start, at most.
_LATE = 3  # Steps by which an unlabelled line of another rank may come late.
_MOST_BYTES = 256 * 2**20
_LEAST_WRAPPED = 3  # Lines of equal, greatest length, from which on a log is taken to have been wrapped.
_NARROWEST = 40  # Characters of a line of a terminal.
_START = 10  # Characters by which the beginnings of two lines are compared.
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_LABEL = re.compile(r"^\s*(?:\[(?:rank|default)?(?P<torchrun>\d+)\]:?|(?P<srun>\d+):(?=\s)|\[\d+,(?P<mpirun>\d+)\]<std\w+>:)\s?")

Unit = Literal["seconds of a step", "tokens a second and device", "samples a second"]


@dataclass(frozen=True, kw_only=True)
class _Format:
    """Lines of one program.

    Attributes
    ----------
    begin
        Begins a record of a step; its group ``step`` is the step's number. A record ends where the next one begins.
    time
        The duration of the step, or a rate, in the group ``value``, in `unit`; the group ``rate`` is steps a second instead.
    memory, batch
        Memory of a device with the bytes of its unit, and the samples of a step.
    is_mean
        Whether a single number stands for all steps.
    """

    program: str
    unit: Unit
    begin: re.Pattern[str]
    time: re.Pattern[str]
    memory: tuple[re.Pattern[str], int] | None = None
    batch: re.Pattern[str] | None = None
    is_mean: bool = False


_N = r"(?P<value>\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?)"
_FORMATS = (
    _Format(
        program="Megatron-LM",
        unit="seconds of a step",
        begin=re.compile(r"iteration\s+(?P<step>\d+)\s*/\s*\d+\s*\|"),
        time=re.compile(rf"elapsed\s+time\s+per\s+iteration\s+\((?P<milli>ms)\):\s*{_N}"),
        memory=(re.compile(rf"memory\s+\(MB\)[^\n]*?max\s+reserved:\s*{_N}"), 2**20),
        batch=re.compile(rf"global\s+batch\s+size:\s*{_N}"),
    ),
    _Format(
        program="NeMo",
        unit="seconds of a step",
        begin=re.compile(r"global_step\"?\s*[:=]\s*(?P<step>\d+)"),
        time=re.compile(rf"train_step_timing\s+in\s+s\"?\s*[:=]\s*{_N}"),
        batch=re.compile(rf"global_batch_size\"?\s*[:=]\s*{_N}"),
    ),
    _Format(
        program="MaxText",
        unit="seconds of a step",
        begin=re.compile(r"completed\s+step:\s*(?P<step>\d+)"),
        time=re.compile(rf"seconds:\s*{_N}"),
    ),
    _Format(
        program="torchtitan",
        unit="tokens a second and device",
        begin=re.compile(r"(?<!validate )\bstep:\s*(?P<step>\d+)\s+loss:"),
        time=re.compile(rf"\btps:\s*{_N}"),
        memory=(re.compile(rf"memory:\s*{_N}\s*GiB"), 2**30),
    ),
    _Format(
        program="DeepSpeed",
        unit="samples a second",
        begin=re.compile(r"(?:global_step=|\s\d+/)(?P<step>\d+),\s*RunningAvgSamplesPerSec"),
        time=re.compile(rf"CurrSamplesPerSec\s*=\s*{_N}"),
        memory=(re.compile(rf"MaxMemAllocated\s*=\s*{_N}\s*GB"), 2**30),
    ),
    _Format(
        program="DeepSpeed",
        unit="seconds of a step",
        begin=re.compile(r"\bsteps:\s*(?P<step>\d+)\s+loss:"),
        time=re.compile(rf"iter\s+time\s+\(s\):\s*{_N}"),
    ),
    _Format(
        program="HF Trainer",
        unit="seconds of a step",
        begin=re.compile(r"(?m)^\s*\d+%\|[^|\n]*\|\s*(?P<step>\d+)/(?P<total>\d+)\s+\["),
        time=re.compile(rf"\[[\d:]+<[\d:?]+,\s*{_N}\s*(?:s/it|(?P<rate>it/s))"),
    ),
    _Format(
        program="HF Trainer",
        unit="seconds of a step",
        begin=re.compile(r"'train_runtime':"),
        time=re.compile(rf"'train_steps_per_(?P<rate>second)':\s*'?{_N}"),
        is_mean=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """Steps of a log.

    Attributes
    ----------
    program
        The program that printed it.
    unit, times
        Each reading after the warm-up as a duration: in seconds, or seconds for a token on a device, or for a sample, [readings].
    left_out
        Readings of the warm-up.
    starts
        How often the training began.
    memory_bytes
        The most memory of a device; None: it was not printed.
    global_batch
        Samples of a step; None: it was not printed.
    is_mean
        Whether the only reading is the mean of all steps, the first ones included.
    """

    program: str
    unit: Unit
    times: Floats
    left_out: int
    starts: int
    memory_bytes: int | None = None
    global_batch: int | None = None
    is_mean: bool = False

    def steps_us(self, tokens_per_device: float | None, samples: float | None) -> Floats:
        """Duration of each step in us, [readings].

        Parameters
        ----------
        tokens_per_device, samples
            Tokens of a step divided by the devices, and samples of a step; None: not known.

        Raises
        ------
        InputError
            The log has rates, and what they count is not known of the job.
        """
        counts = {"seconds of a step": 1.0, "tokens a second and device": tokens_per_device, "samples a second": samples}
        count = counts[self.unit]
        if count is None:
            raise InputError(f"the log has {self.unit}, and the job does not say how many a step has; give --step-time instead")
        return np.asarray(self.times * count * 1e6)


def read_training_log(path: Path) -> TrainingLog:
    """The steps of a log.

    Raises
    ------
    InputError
        The file cannot be read, is of no known program, or has too few steps after the warm-up.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name the log of a training") from error
    if len(raw) > _MOST_BYTES:
        raise InputError(f"{path}: more than {_MOST_BYTES >> 20} MiB; give a part of the log with at least {FEWEST_STEPS} steps")
    plain = _COLOUR.sub("", raw.decode("utf-8", "replace")).replace("\r\n", "\n").replace("\r", "\n")
    texts = (_unwrapped(plain), plain)  # A number may be broken, so that the joined lines decide where both have all steps.
    for known in _FORMATS:
        readings = max((_Readings.of(known, text) for text in texts), key=lambda one: one.count)
        if readings.count:
            return readings.log(path)
    programs = listed([*dict.fromkeys(known.program for known in _FORMATS)])
    raise InputError(f"{path}: no step times in it; logs of {programs} are read, of others give --step-time")


def _unwrapped(text: str) -> str:
    """The text with lines joined that a terminal of fixed width has broken; lines that begin alike were not."""
    lines = text.split("\n")
    width, count = max(Counter(map(len, lines)).items())
    if width < _NARROWEST or count < _LEAST_WRAPPED:
        return text
    starts = [re.sub(r"\d", "0", line[:_START]) for line in lines]
    is_broken = [len(line) == width and start != after for line, (start, after) in zip(lines, pairwise([*starts, ""]), strict=True)]
    return "".join(line if broken else f"{line}\n" for line, broken in zip(lines, is_broken, strict=True))


def _streams(text: str) -> Iterator[tuple[bool, str]]:
    """The lines of each rank, and whether they were labelled; a line without a label belongs to the line before it."""
    lines: dict[str, list[str]] = {"": []}
    rank = ""
    for line in text.split("\n"):
        label = _LABEL.match(line)
        if label is not None:
            rank = next(filter(None, label.groups()))
        lines.setdefault(rank, []).append(line if label is None else line[label.end() :])
    for rank, of_rank in lines.items():
        yield rank != "", "\n".join(of_rank)


@dataclass
class _Readings:
    """Readings of a format, by start of the training."""

    format: _Format
    starts: list[list[float]] = field(default_factory=list)
    ranks: int = 0
    memory_bytes: list[float] = field(default_factory=list)
    batches: list[float] = field(default_factory=list)

    @staticmethod
    def of(known: _Format, text: str) -> _Readings:
        readings = _Readings(known)
        for labelled, stream in _streams(text):
            records = list(_records(known, stream))
            readings.ranks += bool(records)
            readings.starts += _starts(records, 0 if labelled else _LATE)
            if known.memory is not None:
                pattern, unit_bytes = known.memory
                readings.memory_bytes += [_number(match) * unit_bytes for match in pattern.finditer(stream)]
            if known.batch is not None:
                readings.batches += [_number(match) for match in known.batch.finditer(stream)]
        return readings

    @property
    def count(self) -> int:
        return sum(map(len, self.starts))

    def log(self, path: Path) -> TrainingLog:
        """The log; raises `InputError` if too few readings are left after the warm-up."""
        warm = self.starts if self.format.is_mean else [_warm(start) for start in self.starts]
        times = np.array([time for start in warm for time in start])
        if len(times) < FEWEST_STEPS and not self.format.is_mean:
            raise InputError(
                f"{path}: {len(times)} step times of {self.format.program} after the warm-up, of {self.count} in all; at least "
                f"{FEWEST_STEPS} are needed: let the training run for longer, or print more often"
            )
        return TrainingLog(
            program=self.format.program,
            unit=self.format.unit,
            times=times,
            left_out=self.count - len(times),
            starts=-(-len(self.starts) // max(self.ranks, 1)),
            memory_bytes=round(max(self.memory_bytes)) if self.memory_bytes else None,
            global_batch=round(Counter(self.batches).most_common(1)[0][0]) if self.batches else None,
            is_mean=self.format.is_mean,
        )


def _records(known: _Format, text: str) -> Iterator[tuple[int, float]]:
    """Number and duration of each step, in the order of the text."""
    begins = list(known.begin.finditer(text))
    ends = [*(begin.start() for begin in begins[1:]), len(text)]
    bar = _longest_bar(begins)
    for begin, end in zip(begins, ends, strict=False):
        if begin.groupdict().get("total") != bar:
            continue
        time = known.time.search(text, begin.start(), end)
        if time is not None and (value := _number(time)) > 0:
            kinds = time.groupdict()
            is_rate = kinds.get("rate") is not None or known.unit != "seconds of a step"
            yield int(begin.groupdict().get("step") or 0), 1 / value if is_rate else value / (1e3 if kinds.get("milli") else 1.0)


def _longest_bar(begins: Sequence[re.Match[str]]) -> str | None:
    """Number of steps of the progress bar with most lines, since programs draw bars for evaluation as well; None: no bar."""
    totals = Counter(begin.groupdict().get("total") for begin in begins)
    return totals.most_common(1)[0][0] if totals else None


def _starts(records: Sequence[tuple[int, float]], late: int) -> list[list[float]]:
    """Durations by start: a step number that falls back by more than `late` of the numbers before it begins a new one."""
    starts: list[list[float]] = []
    numbers: list[int] = []
    distinct = [one for before, one in pairwise([(-1, 0.0), *records]) if one != before]  # a bar is drawn several times
    for number, time in distinct:
        if not numbers or (number <= max(numbers) and number not in numbers[-max(late, 1) :]) or (not late and number in numbers):
            starts.append([])
            numbers = []
        if number not in numbers:
            numbers.append(number)
        starts[-1].append(time)
    return starts


def _warm(times: Sequence[float]) -> list[float]:
    """Readings of one start without those of its warm-up (see above)."""
    limit = _WARM * float(np.median(times[len(times) // 2 :]))
    first = next((place for place, time in enumerate(times) if place and time <= limit), len(times))
    return list(times[first:])


def _number(match: re.Match[str]) -> float:
    return float(match["value"].replace(",", ""))
