"""Tables of tuned kernels: one row for each configuration on each device.

Columns: `kernel`, `device`, the parameters, `time_ms_median` or `time_ms_mean`, and where they are known `time_ms_std` and `status`
(a word other than "ok" says that a configuration failed to compile, to run, or gave wrong results: it has no latency).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas

from dpro_search.costmodel.programs.features import occupancy_columns, program_columns
from dpro_search.costmodel.programs.kernel import KernelProgram
from dpro_search.costmodel.programs.limits import limits_of
from dpro_search.errors import InputError
from experiments.tensor_programs.kernels.front_ends import FRONT_ENDS

Floats = npt.NDArray[np.float64]
_TIMES = ("time_ms_median", "time_ms_mean")  # the first that a table has
_MEASURED = (*_TIMES, "time_ms_std", "repeats", "status", "compile_time_ms", "gflops", "gb_s", "split")
_FASTEST_US, _SLOWEST_US = 0.5, 1e8  # No launch is shorter, and no tuner waits longer.
_OTHER_UNITS = 30.0  # Medians of a kernel on two GPUs of these years do not differ so much.


@dataclass(frozen=True, kw_only=True)
class KernelTable:
    """Configurations of one kernel, with their times on devices.

    Attributes
    ----------
    parameters : array [programs, parameters]
    us : array [programs, devices]
        Median time; NaN where a program failed or was not tried.
    noise_pct
        Deviation of a program's repeats, median over programs; None where the table does not say.
    remarks
        What was left out, and what a reader has to know.
    """

    kernel: str
    names: tuple[str, ...]
    parameters: npt.NDArray[np.int64]
    devices: tuple[str, ...]
    us: Floats
    noise_pct: float | None
    remarks: tuple[str, ...] = field(default=())

    @cached_property
    def programs(self) -> list[KernelProgram] | None:
        """Compact ASTs; None for a kernel whose source has no front end."""
        front_end = FRONT_ENDS.get(self.kernel)
        if front_end is None:
            return None
        return [front_end(dict(zip(self.names, map(int, row), strict=True))) for row in self.parameters]

    @cached_property
    def parameter_columns(self) -> Floats:
        """Parameters alone: their logarithms, or as they are where one is 0."""
        varied = self.parameters[:, np.ptp(self.parameters, axis=0) > 0].astype(float)
        return np.where(varied.min(axis=0) > 0, np.log2(np.maximum(varied, 1)), varied)

    @cached_property
    def _of_programs(self) -> Floats:
        return self.parameter_columns if self.programs is None else program_columns(self.programs)

    def columns(self, device: str) -> Floats:
        """Columns of all programs on a device, [programs, columns]: of their parameters where the kernel has no front end."""
        limits = limits_of(device)
        if self.programs is None or limits is None:
            return self._of_programs
        joined = np.column_stack([self._of_programs, occupancy_columns(self.programs, limits)])
        return joined[:, np.ptp(joined, axis=0) > 0]


def read(folder: Path, skipped: list[str]) -> list[KernelTable]:
    """Tables of a folder (`*.csv`, `*.csv.gz`), one for each kernel, whose rows may come from several files.

    What is no such table is named in `skipped`.

    Raises
    ------
    InputError
        No table is there.
    """
    frames: dict[str, list[pandas.DataFrame]] = {}
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        frame = pandas.read_csv(path)
        time = next((name for name in _TIMES if name in frame), None)
        if time is None or not {"kernel", "device"} <= set(frame):
            skipped.append(f"{path.name}: no table of tuned kernels (needs kernel, device, time_ms_median and parameters)")
            continue
        for name, part in frame.groupby("kernel"):
            frames.setdefault(str(name), []).append(part.rename(columns={time: _TIMES[0]}))
    if not frames:
        raise InputError(f"{folder}: no table of tuned kernels is there; expected CSV files with kernel, device, time_ms_median")
    return [_table(name, _joined(name, parts, skipped)) for name, parts in frames.items()]


def _joined(kernel: str, parts: list[pandas.DataFrame], skipped: list[str]) -> pandas.DataFrame:
    """Rows of a kernel from several files; those of a file that has other parameters than the first one are left out."""
    names = set(_parameters(parts[0]))
    alike = [part for part in parts if set(_parameters(part)) == names]
    if len(alike) < len(parts):
        skipped.append(
            f"{kernel}: {len(parts) - len(alike)} files have other parameters than the first ({', '.join(sorted(names))})"
        )
    return pandas.concat(alike, ignore_index=True)


def _parameters(frame: pandas.DataFrame) -> list[str]:
    return [name for name in frame if name not in ("kernel", "device", *_MEASURED)]


def _table(kernel: str, frame: pandas.DataFrame) -> KernelTable:
    time, names = _TIMES[0], _parameters(frame)
    remarks = []
    good = frame[frame["status"] == "ok"] if "status" in frame else frame
    if len(good) < len(frame):
        remarks.append(f"{len(frame) - len(good)} configurations failed to compile or to run: no latencies")
    us = 1e3 * good[time]
    sane = np.isfinite(us) & (us >= _FASTEST_US) & (us <= _SLOWEST_US)
    if not sane.all():
        remarks.append(f"{int((~sane).sum())} rows say ok and have times below {_FASTEST_US} us or none: left out")
    good = good[sane].assign(us=us[sane])
    repeated = int(good.duplicated([*names, "device"]).sum())
    if repeated:
        remarks.append(f"{repeated} configurations stand twice for a device: their median is used")
    wide = good.pivot_table(index=names, columns="device", values="us", aggfunc="median")
    noise = None
    if "time_ms_std" in good and good["time_ms_std"].notna().any():
        noise = float(np.nanmedian(100 * good["time_ms_std"] / good[time]))
    table = wide.to_numpy(dtype=float)
    devices = tuple(map(str, wide.columns))
    remarks += [*_unmatched(table, devices), *_other_units(table, devices)]
    parameters = np.array(wide.reset_index()[names], dtype=np.int64)
    return KernelTable(
        kernel=kernel, names=tuple(names), parameters=parameters, devices=devices, us=table, noise_pct=noise, remarks=tuple(remarks)
    )


def _unmatched(us: Floats, devices: Sequence[str]) -> list[str]:
    everywhere = int((~np.isnan(us)).all(axis=1).sum())
    if everywhere == len(us):
        return []
    each = ", ".join(f"{name} {int((~np.isnan(us[:, place])).sum())}" for place, name in enumerate(devices))
    return [f"{everywhere} of {len(us)} programs have times on all devices ({each})"]


def _other_units(us: Floats, devices: Sequence[str]) -> list[str]:
    middle = np.nanmedian(us, axis=0)
    usual = np.median(middle)
    return [
        f"{name}: times are {value / usual:.2g} times the others' in the median; they may be in other units, only their order and "
        "ratios are used"
        for name, value in zip(devices, middle, strict=True)
        if not 1 / _OTHER_UNITS < value / usual < _OTHER_UNITS
    ]
