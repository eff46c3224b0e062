"""`MachineConstants`: what the cost models know of a machine beyond what a recording shows, each value with its origin.

A recording shows how long ops and transfers took. It does not show how a wake-up on a busy core delays a small message where the
job had none, or what a compressed gradient costs before any was compressed. Such values come from other jobs on a machine, and hold
for machines like that one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

import msgspec

MACHINE_VERSION = 1
Status = Literal["measured", "fitted", "scaled", "borrowed", "chosen", "bundled"]
Device = Literal["cpu", "gpu"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def _require(self, holds: bool, rule: str) -> None:
        """For `__post_init__`: raise `ValueError` with the rule that a file breaks."""
        if not holds:
            raise ValueError(rule)


class Origin(_Section, frozen=True, kw_only=True):
    """The source of values."""

    # machine, date, how: Where, when, and by which command, jobs or report.
    machine: str
    date: str
    how: str
    # "measured" or "fitted" on that machine; "scaled": the bundled value times the ratio of a probe here and on the bundled file's
    # machine; "borrowed" from another kind of job; "chosen" without a measurement; "bundled": of the package's own file, and not
    # measured on the machine that the file is of.
    status: Status


class HostConstants(_Section, frozen=True, kw_only=True):
    """Constants of every job on CPU ranks."""

    late_end_us: float  # A collective may be seen to end so much later than the thread that waited for it went on.
    least_us_per_byte: float  # No memory is faster.
    saturation_bytes: float  # Of the sockets' buffers on both ends: an all-reduce of more bytes has the latency of a large one.
    tcp_goodput: float  # Share of a link's rate that is payload of TCP.
    mapped_bytes: float  # Memory of so many bytes is mapped and unmapped by the C library: fresh at each call.

    def __post_init__(self) -> None:
        self._require(self.saturation_bytes > 0, "saturation_bytes must be above 0")
        self._require(0 < self.tcp_goodput <= 1, "tcp_goodput must be a share above 0")


class HorovodConstants(_Section, frozen=True, kw_only=True):
    """Constants of Horovod's fused all-reduces between CPU ranks."""

    # collective_cpu_us, cycle_cpu_us, cpu_us_per_byte: Core time of an all-reduce beside its bytes; of a cycle and of a byte (TCP
    # send, receive and the sum of float32), where the recording does not show them.
    collective_cpu_us: float
    cycle_cpu_us: float
    cpu_us_per_byte: float
    negotiation_floor_us: float  # No negotiation between two processes of one machine is faster.
    # negotiation_busy_us, negotiation_idle_us: Of a recording without cycles: while a rank computes, while none does.
    negotiation_busy_us: float
    negotiation_idle_us: float
    # Rows of a link's rate in bit/s and the latencies alpha busy, alpha more and alpha tail (see `costmodel.horovod`).
    alpha_us_by_rate: tuple[tuple[float, float, float, float], ...]
    alpha_observations: float  # How many observed transfers these latencies count for.
    # latency_spread_us, transfer_spread: Standard deviations: of a latency, and of a transfer relative to the wire's time.
    latency_spread_us: float
    transfer_spread: float
    # dispatch_us, copy_us_per_byte: Pause between two collectives of a cycle, and copies around a transfer, where the recording
    # shows too few.
    dispatch_us: float
    copy_us_per_byte: float

    def __post_init__(self) -> None:
        self._require(self.latency_spread_us > 0, "latency_spread_us must be above 0")
        rates = [row[0] for row in self.alpha_us_by_rate]
        ascending = all(one < other for one, other in itertools.pairwise((0.0, *rates)))
        self._require(bool(rates) and ascending, "the rates of alpha_us_by_rate must ascend from above 0")


class MpiConstants(_Section, frozen=True, kw_only=True):
    """Constants of Horovod on Open MPI, whose ranks poll and whose transfers may be half-duplex."""

    wire_times: tuple[float, float]  # That a transfer takes on a limited link: beside computing ranks, and in a step's tail.
    # wire_times_observations, wire_times_spread: How many observed transfers they count for, and the standard deviation of a
    # transfer in wire times.
    wire_times_observations: float
    wire_times_spread: float
    polling_bounds: tuple[float, float]  # Least and largest share of a computing rank's core that polling takes.

    def __post_init__(self) -> None:
        least, most = self.polling_bounds
        self._require(least <= most < 1, "polling_bounds must be two ascending shares below 1")
        self._require(self.wire_times_observations > 0, "wire_times_observations must be above 0")


class TorchConstants(_Section, frozen=True, kw_only=True):
    """Constants of Gloo's collectives in PyTorch jobs on CPU ranks."""

    collective_cpu_us: float  # Core time of an all-reduce beside its bytes.
    # alpha_us, alpha_observations: Latencies alpha busy, alpha more and alpha tail, and how many observed transfers they count for.
    alpha_us: tuple[float, float, float]
    alpha_observations: float
    # latency_spread_us, transfer_spread: Standard deviations: of a latency, and of a transfer relative to its duration.
    latency_spread_us: float
    transfer_spread: float
    beginning_us: float  # Of a transfer: its latency lies there.

    def __post_init__(self) -> None:
        self._require(self.latency_spread_us > 0, "latency_spread_us must be above 0")
        self._require(self.alpha_observations > 0, "alpha_observations must be above 0")


class HalfGradientConstants(_Section, frozen=True, kw_only=True):
    """Core time of PyTorch's fp16 hook for each byte of a float32 bucket."""

    # cast_us_per_byte, cast_mapped_us_per_byte: Cast to half; into memory that is fresh at each call.
    cast_us_per_byte: float
    cast_mapped_us_per_byte: float
    back_us_per_byte: float  # Copy of the reduced half into the bucket.
    sum_us_per_byte: float  # An all-reduce of halves beside one of as many bytes of float32.


class _Stores(_Section, frozen=True, kw_only=True):
    """A kind's `space.servers.cost_spread.CostSpread`: standard deviations of the logarithms of its costs between recordings."""

    spread_common: float
    spread_worker: float
    spread_message: float
    spread_server: float
    spread_step: float


class KvstoreConstants(_Stores, frozen=True, kw_only=True):
    """Constants of MXNet's KVStore."""

    quantum_us: float  # For so long an operator keeps a core that others want.
    both_ways_share: float  # Of a lone sender's goodput, what a link carries while it is filled in both directions.
    # slice_us, update_call_us, worker_call_share: Core time of a server for the messages of a slice, and for a call of the
    # optimizer; share of a call that a worker takes.
    slice_us: float
    update_call_us: float
    worker_call_share: float
    # quantize_us_per_byte, dequantize_us_per_byte: Core time of 2-bit gradients for each byte of float32.
    quantize_us_per_byte: float
    dequantize_us_per_byte: float

    def __post_init__(self) -> None:
        self._require(self.quantum_us > 0, "quantum_us must be above 0")
        self._require(self.both_ways_share > 0, "both_ways_share must be above 0")


class BytepsConstants(_Stores, frozen=True, kw_only=True):
    """Constants of BytePS with MXNet."""

    message_us: float  # Core time of a message whatever its size: queues, hand-over between threads, system calls.
    quantum_us: float  # For so long an operator keeps a core that others want.
    most_polling: float  # Largest share of a core that servers take while they look for work.
    # cast_call_us, cast_us_per_byte: Core time of a worker for each float32 gradient that travels as fp16 and for each of its
    # bytes, both ways together.
    cast_call_us: float
    cast_us_per_byte: float

    def __post_init__(self) -> None:
        self._require(self.quantum_us > 0, "quantum_us must be above 0")
        self._require(self.most_polling < 1, "most_polling must be below 1")


class PowersgdConstants(_Section, frozen=True, kw_only=True):
    """Constants of PyTorch's PowerSGD hook."""

    uncertainty: float  # Of the core time, relative.
    tall_rows: float  # From so many rows on the second product takes longer.
    # stages_us_rank1, stages_us_rank2, stages_us_rank4: Core time of the four stages per unit of each of the eight features (see
    # `costmodel.powersgd`), [4, 8].
    stages_us_rank1: tuple[tuple[float, ...], ...]
    stages_us_rank2: tuple[tuple[float, ...], ...]
    stages_us_rank4: tuple[tuple[float, ...], ...]

    def stages_us(self, rank: int) -> tuple[tuple[float, ...], ...]:
        """The table of a rank of the factors, 1, 2 or 4."""
        return {1: self.stages_us_rank1, 2: self.stages_us_rank2, 4: self.stages_us_rank4}[rank]

    def __post_init__(self) -> None:
        tables = (self.stages_us_rank1, self.stages_us_rank2, self.stages_us_rank4)
        whole = all([len(row) for row in table] == [8] * 4 for table in tables)
        self._require(whole, "a table of stages must have 4 rows of 8 numbers")


class GpuConstants(_Section, frozen=True, kw_only=True):
    """Constants of a host with GPUs."""

    launch_us: float  # Of a kernel, where no recorded launch met an idle stream.
    # step_spread, step_spread_steps: Standard deviation of a step's iteration time relative to it, in profiles of other jobs; it
    # weighs as much as so many steps of a job's own profile.
    step_spread: float
    step_spread_steps: float
    replay_error: float  # Standard deviation of the replay of a recorded step from what was measured, relative to it.

    def __post_init__(self) -> None:
        self._require(self.step_spread > 0, "step_spread must be above 0")
        self._require(self.step_spread_steps > 0, "step_spread_steps must be above 0")


class ProbeConstants(_Section, frozen=True, kw_only=True):
    """Small measurements without a framework. No prediction uses them; their ratio between two machines scales other constants."""

    copy_us_per_byte: float  # Core time to copy a byte that no cache keeps.
    tcp_us_per_byte: float  # Core time per byte of a tensor that two processes all-reduce over loopback TCP.
    round_trip_us: float  # Of a small message between two processes: the first percentile.
    time_slice_us: float  # How long a process keeps a core that another wants all the time: the median.

    def __post_init__(self) -> None:
        self._require(all(getattr(self, name) > 0 for name in self.__struct_fields__), "a probe must be above 0")


class ErrorBars(_Section, frozen=True, kw_only=True):
    """Model error of each kind of job, relative to the prediction: (recorded setting, changed setting)."""

    widening: float  # Factor on the model error of a kind of job or device for which it was not calibrated.
    # Uncertainty of ops in bfloat16 whose type was never measured, relative to their time in float32, which they keep.
    unmeasured_ops: float
    horovod: tuple[float, float]
    horovod_mpi: tuple[float, float]
    ddp: tuple[float, float]
    fsdp: tuple[float, float]
    kvstore: tuple[float, float]
    byteps: tuple[float, float]
    data_parallel: tuple[float, float]

    def __post_init__(self) -> None:
        self._require(self.widening >= 1, "widening must be at least 1")


class MachineConstants(_Section, frozen=True, kw_only=True):
    """The constants of one machine."""

    name: str  # Of the machine, for people.
    device: Device  # What its ranks compute on.
    processors: tuple[str, ...]  # Models on which the error bars were measured.
    host: HostConstants
    horovod: HorovodConstants
    mpi: MpiConstants
    torch: TorchConstants
    half_gradients: HalfGradientConstants
    kvstore: KvstoreConstants
    byteps: BytepsConstants
    powersgd: PowersgdConstants
    gpu: GpuConstants
    probes: ProbeConstants
    errors: ErrorBars
    origins: Mapping[str, Origin]  # Of each value, by "section.name".


SECTIONS: Mapping[str, type[_Section]] = {
    "host": HostConstants,
    "horovod": HorovodConstants,
    "mpi": MpiConstants,
    "torch": TorchConstants,
    "half_gradients": HalfGradientConstants,
    "kvstore": KvstoreConstants,
    "byteps": BytepsConstants,
    "powersgd": PowersgdConstants,
    "gpu": GpuConstants,
    "probes": ProbeConstants,
    "errors": ErrorBars,
}
