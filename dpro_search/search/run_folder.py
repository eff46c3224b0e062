"""The folder of a search: its identity, the journal of finished trials, and the results.

========================  ==================================================================================
``run.json``              `RunInfo`: what the search depends on
``trials.jsonl``          one `Trial` a line, in order, appended while the search runs; a resumed search reads it. With
                          ``--storage`` the trials are in the storage, and this is a copy, written when the search ends
``result.json``           the result, written when a search ends or is stopped
``topn.csv``              the best plans as a table
``pareto.csv``            Pareto front of time and memory, if memory depends on the plan
``plans/plan-<n>.json``   the best plans, 1 is the best
========================  ==================================================================================
"""

from __future__ import annotations

import fcntl
import io
import os
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, overload

import msgspec

from dpro_search._regular_files import open_regular, read_regular
from dpro_search.cluster import Cluster
from dpro_search.collect._files import DAMAGED, what_is, write_file
from dpro_search.collect.trace import CommSettings
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import decoded

RUN_VERSION = 2  # 1: all settings were fields of a plan
_FLUSH_S = 0.5
_READ_BYTES = 2**20
_FLUSH_BYTES = 2**18  # per write: fits the processor's cache


MOST_ISLANDS = 1024


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a search depends on. Two searches that agree in all but `trace` and `created` evaluate the same plans.

    A folder is continued with the number of islands of its first search, for any number of workers.
    """

    version: int = RUN_VERSION
    sampler: str
    seed: int
    trace: str  # path of the trace; it may move
    trace_digest: str
    recorded: CommSettings | None  # Horovod's knobs; None for other kinds of jobs
    created: str
    storage: str | None = None  # where the trials are, if not here; without its password
    id: str = ""  # identifies a run among those that share a storage
    options: dict[str, str] = {}  # what predictions depend on beside the trace: limits, allowed transformations, their cost models
    islands: Annotated[int, msgspec.Meta(ge=1, le=MOST_ISLANDS)] = 1  # samplers that share the trials (see `islands.py`)
    cluster: SearchedCluster | None = None  # None: the recorded one
    asks_first: bool = False  # Whether the job's questions were tried first; not so in folders of earlier versions.


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster that predictions are for: its name, its ranks, assumptions as sentences, and what the intervals are based on."""

    name: str
    ranks: int
    assumed: tuple[str, ...]
    interval: str


class SearchedCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster that the predictions of a search are for, if that is not the recorded one."""

    name: str  # For people.
    machines: Cluster | None = None  # In place of the recorded ones; None: these.
    changes: tuple[str, ...] = ()  # Changes of cluster and speeds, as ``--set`` takes them.
    # ranks, ranks_per_host: Number of ranks, and those side by side on each host (None: hosts differ).
    ranks: int
    ranks_per_host: int | None = None
    assumed: tuple[str, ...] = ()  # What the predictions take for granted, a sentence each.
    interval: str = ""  # What their intervals come from.

    @property
    def facts(self) -> ClusterFacts:
        """The cluster as answers have it."""
        return ClusterFacts(name=self.name, ranks=self.ranks, assumed=self.assumed, interval=self.interval)


class Trial(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An evaluated plan."""

    number: int  # Place in the order in which plans were proposed, from 0.
    origin: str  # The sampler that proposed the plan; "recorded" for trial 0.
    plan: Plan
    prediction: Prediction
    # How many results the sampler had received when it proposed this plan; None: of all trials before it or, if several samplers
    # share the trials, as `islands.py` defines. Fewer if several plans are evaluated at a time.
    told: int | None = None


class JournalTrials(Sequence[Trial]):
    """The trials that a journal had when it was opened, each read from the file when it is used.

    Decoded, a trial takes ten times as much memory as its line, and a search may have hundreds of thousands.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # not that of the journal, which ends with the lock
        weakref.finalize(self, os.close, self._descriptor)
        self._starts = array("q", [0])  # of the lines, and the end of the last
        for line in io.BufferedReader(io.FileIO(self._descriptor, closefd=False), _READ_BYTES):
            if not line.endswith(b"\n"):
                break  # cut off
            self._starts.append(self._starts[-1] + len(line))
            number = len(self) - 1
            if (stored_number := self._decoded(line, number).number) != number:
                raise self._damaged(number, f"trial {stored_number} where {number} belongs")

    @property
    def whole_bytes(self) -> int:
        """Size of the complete lines."""
        return self._starts[-1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trial]: ...
    def __getitem__(self, index: int | slice) -> Trial | list[Trial]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        first, end = self._starts[number], self._starts[number + 1]
        return self._decoded(os.pread(self._descriptor, end - first, first), number)

    def _decoded(self, line: bytes, number: int) -> Trial:
        try:
            return decoded(line, Trial)
        except (*DAMAGED, InputError) as error:
            raise self._damaged(number, str(error)) from error

    def _damaged(self, number: int, what: str) -> InputError:
        return InputError(f"{self._path}: line {number + 1} is damaged ({what}); choose another --out")


class Journal:
    """The trials of a run folder: those of an earlier search, and a file to which new ones are appended.

    Use as a context manager: leaving the block writes what is pending. Appending is buffered for at most half a second plus one
    trial, and never waits for the disk. A killed search loses its last few trials; when it is continued, it finds them again.

    Attributes
    ----------
    trials
        Trials that were finished when it was opened, in order, without a last line that was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending = bytearray()
        self._flushed_s = time.monotonic()
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            _lock(self._file, path)
            self.trials = JournalTrials(path)
            os.truncate(self._file.fileno(), self.trials.whole_bytes)
        except BaseException:
            self._file.close()
            raise

    def append(self, trial: Trial) -> None:
        """Append a trial to the buffer."""
        self._pending += line_of(trial)
        if len(self._pending) >= _FLUSH_BYTES or time.monotonic() - self._flushed_s >= _FLUSH_S:
            self.flush()

    def fileno(self) -> int:
        """The file's descriptor, which holds the lock: a forked process must close it."""
        return self._file.fileno()

    def flush(self) -> None:
        """Write what is pending; raises `MissingCapabilityError` if the disk cannot take it."""
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
        except OSError as error:
            self._pending.clear()
            raise _unwritable(self.path, error) from error
        self._flushed_s = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if error is None:
                self.flush()
            else:
                with suppress(MissingCapabilityError):  # the first error is the one to report
                    self.flush()
        finally:
            self._file.close()


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run folder whose trials are in a storage; raises `InputError` if another search has locked it."""
    path = folder / "run.json"
    with open_regular(path) as file:
        _lock(file, path)
        yield


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InputError(f"{path}: another search is writing it; wait for its end or choose another --out") from error


def line_of(trial: Trial) -> bytes:
    """A trial as the journal holds it."""
    return msgspec.json.encode(trial) + b"\n"


def read_run(folder: Path) -> RunInfo:
    """Read ``run.json``; raises `InputError` if the folder is not a run folder."""
    path = folder / "run.json"
    try:
        require_no_links(folder)
        raw = read_regular(path)
        version = msgspec.json.decode(raw, type=_Version).version
        if version not in (1, RUN_VERSION):
            raise InputError(f"{path}: version {version} of run folders, this program reads 1 to {RUN_VERSION}; update dpro-search")
        return msgspec.json.decode(raw, type=RunInfo)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{folder}: not the folder of a search, but {what_is(folder)}; make one with 'dpro-search run'") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make it with 'dpro-search run'") from error
    except DAMAGED as error:
        raise InputError(f"{path}: damaged ({error}); search again with 'dpro-search run'") from error


class _Version(msgspec.Struct):
    version: int


def require_no_links(folder: Path) -> None:
    """Raise `InputError` if a run folder, or its folder of plans, holds a link: it may lead to a file of somebody else."""
    plans = folder / "plans"
    for place in (folder, *([plans] if plans.is_dir() and not plans.is_symlink() else [])):
        for entry in place.iterdir():
            if entry.is_symlink():
                raise InputError(f"{entry}: a link, and links in a run folder are not followed; put the file itself there")


def open_run(folder: Path, info: RunInfo) -> RunInfo:
    """Make a run folder, or check that one that exists belongs to the same search.

    Returns
    -------
    RunInfo
        `info`, or what the folder was made with.

    Raises
    ------
    InputError
        The folder is something else, or belongs to a search that differs in a field that the message names.
    MissingCapabilityError
        The disk cannot take it.
    """
    path = folder / "run.json"
    try:
        if not path.is_file():
            if folder.exists() and (not folder.is_dir() or any(not entry.name.startswith(".") for entry in folder.iterdir())):
                raise InputError(f"{folder}: exists and is not a run folder (no run.json); choose another --out")
            _write_info(path, info)
            return info
        require_no_links(folder)
        written = msgspec.json.decode(read_regular(path), type=RunInfo)
    except DAMAGED as error:
        raise InputError(f"{path}: damaged ({error}); choose another --out") from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    earlier = msgspec.structs.replace(written, version=RUN_VERSION) if written.version == 1 else written
    if earlier.trace_digest != info.trace_digest:
        raise InputError(f"{folder}: a search of another trace ({earlier.trace}); give that TRACE or choose another --out")
    _check_cluster(path, earlier, info)
    for field, option in _IDENTITY.items():
        theirs, ours = getattr(earlier, field), getattr(info, field)
        if theirs != ours:
            raise InputError(
                f"{path}: a search with another {field} ('{_short(theirs)}', not '{_short(ours)}'); {option}choose another --out"
            )
    if written != earlier:  # new lines of the journal are of this version
        _write_info(path, earlier)
    return earlier


def _write_info(path: Path, info: RunInfo) -> None:
    write_file(path, msgspec.json.format(msgspec.json.encode(info), indent=1) + b"\n")


def _check_cluster(path: Path, earlier: RunInfo, info: RunInfo) -> None:
    """Raise `InputError` if the options of two searches differ in their cluster."""
    for name, option in (("cluster", "--cluster"), ("set", "--set")):
        if earlier.options.get(name) != info.options.get(name):
            theirs, ours = _place(earlier), _place(info)
            other = f"not for {ours}" if theirs != ours else "whose file or machine has changed since"
            raise InputError(f"{path}: a search for {theirs}, {other}; give the same {option} or choose another --out")


def _place(info: RunInfo) -> str:
    if info.cluster is not None:
        return info.cluster.name
    return info.options.get("cluster", "the recorded cluster")


_IDENTITY = {
    "version": "",
    "sampler": "give the same --sampler or ",
    "seed": "give the same --seed or ",
    "storage": "give the same --storage or ",
    "options": "give the same options or ",
}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 12 else f"{text[:12]}..."


def _unwritable(path: Path, error: OSError) -> MissingCapabilityError:
    reason = error.strerror or str(error)
    return MissingCapabilityError(f"{path}: cannot be written ({reason}); make room, then run the same command to continue")
