"""Facts of a trace about the recording as a whole: provenance, settings, clocks. On disk, ``meta.json``."""

from __future__ import annotations

import itertools
import math

import msgspec

from dpro_search.errors import InputError

TRACE_VERSION = 2
_MOST_OF_A_KNOB = 1e15  # bytes, or anything smaller


class AllocatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the framework's own allocator in the profiled steps, for the rank that took the most.

    TensorFlow's on a CPU ("mklcpu") leaves out whatever is smaller than 256 KiB.
    """

    name: str
    peak_bytes: int  # most in use, in pieces as the allocator hands them out
    requested_peak_bytes: int  # the same, but of what was taken in these steps only as much as was requested
    least_bytes: int  # least in use: what stays from step to step


class CommSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The communication library's knobs as recorded."""

    fusion_threshold_bytes: int
    cycle_time_us: float
    groups: tuple[tuple[str, ...], ...] | None = None  # tensor names of exact groups; None: dynamic fusion


class ClockReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks' clocks were aligned: what was subtracted, and what stays unknown."""

    offset_us: tuple[float, ...]  # per rank, 0 for rank 0
    residual_us: tuple[float, ...]  # per rank: half-width of a 95 % interval of the offset
    method: str


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """CPU use of a machine while a job was recorded, in cores: by the job and its recorder, and by all else."""

    cores: int  # of the machine
    job_cores: float
    other_cores: float


WORLD_SIZE = "WORLD_SIZE"  # knob of an imported profile: ranks of the job, of which some may not be in the trace


class TraceMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance and settings of a recording."""

    version: int = TRACE_VERSION
    framework: str
    comm: str
    ranks: int
    hosts: tuple[str, ...]  # host of each rank; "" where it is not known
    cores: tuple[int, ...]  # core of each rank, -1 where not pinned
    rate_bps: float | None = None  # shaped link rate per host and direction; None: not shaped
    host_cpus: tuple[float, ...] = ()  # CPU quota of each host, in cores; empty: none had one
    host_changes: tuple[str, ...] = ()  # of quotas and links while the job ran, like "30s:h2.cpus=0.25"
    settings: CommSettings | None = None  # None: not a Horovod job
    format: str = "tensorflow-horovod"  # what the raw files were
    clock: ClockReport
    versions: dict[str, str] = {}
    knobs: dict[str, str] = {}  # settings of the communication library, by the name of their environment variable
    command: tuple[str, ...] = ()
    machine: str = ""
    recorded_at: str = ""
    overhead_pct: float | None = None  # traced over untraced steps
    unprofiled_us: float | None = None  # median step of an imported job between its profiled steps, by the hosts' clocks
    peak_rss_bytes: int | None = None  # largest of all ranks
    allocator: AllocatorReport | None = None
    idle_cycle_cpu_us: float | None = None  # CPU time of one wake-up of the communication thread with nothing to do
    dropped: dict[str, int] = {}  # raw events that were left out, by reason
    warnings: tuple[str, ...] = ()
    load: MachineLoad | None = None  # None: not measured
    # Number in the job of each recorded rank, where only some were recorded or their numbers have gaps; empty: 0, 1, 2...
    rank_numbers: tuple[int, ...] = ()
    world_size: int | None = None  # Ranks of the job, recorded or not; None: not known.
    # Recorded ranks (by their place) whose profile has launches of kernels, but no record of the device that ran them.
    unrecorded_devices: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()  # GPU of each rank, as its driver names it; empty: none, or not known.

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number in the job of each recorded rank."""
        return self.rank_numbers or tuple(range(self.ranks))

    @property
    def device(self) -> str:
        """The GPU that all ranks have; "": none, or not known, or they differ."""
        return self.devices[0] if len(set(self.devices)) == 1 else ""

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks side by side on each of several hosts; 1 where all are on one, without links; None: hosts differ."""
        runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(self.hosts)]
        if len(runs) == 1:
            return 1
        alike = len({count for _, count in runs}) == 1 and len({host for host, _ in runs}) == len(runs)
        return runs[0][1] if alike else None

    def number_knob(self, name: str, unset: float, *, least: float = 0) -> float:
        """A knob that is a number, `unset` where it was not recorded; raises `InputError` if it is no number or below `least`."""
        text = self.knobs.get(name)
        if text is None:
            return unset
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= _MOST_OF_A_KNOB:
            raise InputError(f"meta.json: knobs: {name}={text}: must be a number >= {least:g}; record the job again")
        return value


def on_this_machine(meta: TraceMeta) -> TraceMeta:
    """The launch of a profiled job with all its ranks on one host, for jobs whose hosts are not known."""
    ranks = max(round(meta.number_knob(WORLD_SIZE, 0)), meta.ranks)
    free = {"rate_bps": None, "host_cpus": (), "host_changes": ()}
    return msgspec.structs.replace(meta, ranks=ranks, hosts=("this machine",) * ranks, cores=(-1,) * ranks, **free)
