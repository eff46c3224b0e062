"""`CAUSES`: why a job may be slower, or take more memory, than is expected, each with a physical model.

A cause has one or several effects: the job with the cause at one severity, which is replayed. Factors say what no replay has, like
a step that waits for its input. Words, signs and sources are in ``causes.toml``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from dpro_search.analysis.expect.quantities import Quantity
from dpro_search.cluster import Cluster, Device, Host, HostGroup, Link
from dpro_search.costmodel.collectives.nccl import placement_of
from dpro_search.errors import InputError
from dpro_search.parallel.file.description import options_on
from dpro_search.parallel.frameworks import FRAMEWORKS, ON_WHEELS, as_compiled, with_attention
from dpro_search.parallel.gpu_ops import NARROW, achieved_by
from dpro_search.parallel.model import Network
from dpro_search.parallel.runtime import CHECKED_RANK_US, Runtime
from dpro_search.parallel.strategy import Recompute
from dpro_search.parallel.workload import Workload

SOCKET_BPS = (10e9, 25e9, 50e9)
"""Bits a second of a host over TCP (causes.toml, "tcp-instead-of-rdma")."""
SOCKET_LATENCY_US = 30.0
CHECK_EXCHANGES = 3.0
"""Exchanges of few bytes before each collective that is checked: a monitored barrier and two all-gathers (`CHECKED_RANK_US`)."""
_FEW_BYTES = 1024.0
STALLS = (1.1, 1.25, 1.6, 2.2)
SLOWER = (1.1, 1.25, 1.6, 2.2)
SLOWED_DOWN = 4.0
"""Times that a clock falls by at most: hardware slowdown and power brake cut it to a half or a quarter (nvidia-smi's manual,
"Clocks Event Reasons": "reduced by a factor of 2 or more")."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A job with a cause at one severity.

    Attributes
    ----------
    words
        The severity; empty: the cause has one only.
    replay
        The workload with the cause; None: that of the job.
    factors
        By how much quantities are multiplied beside what the replay shows.
    counted, counts
        Rates that count "tokens" (and samples), or "flops", are that many times as high as they are.
    on_one_host
        Whether one host alone has the cause as well.
    graded
        Whether severities between this one and the one before, or none for the first, are as possible.
    """

    words: str = ""
    replay: Workload | None = None
    factors: Mapping[Quantity, float] = field(default_factory=dict)
    counted: float = 1.0
    counts: str = ""
    on_one_host: bool = True
    graded: bool = False


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A job as it is described, of which causes make others.

    Attributes
    ----------
    framework
        One of `FRAMEWORKS`.
    step_ratio
        Measured over predicted step time of such jobs: quantiles of 5 and 95 %.
    """

    workload: Workload
    framework: str
    step_ratio: tuple[float, float]

    @property
    def host(self) -> Host:
        """One of its hosts."""
        return self.workload.cluster.groups[0].host

    @property
    def device(self) -> Device:
        """The device that a rank computes on."""
        return self.host.device

    @property
    def on_gpus(self) -> bool:
        """Whether ranks compute on GPUs, not on cores."""
        return self.device.kind == "gpu"

    @property
    def several_hosts(self) -> bool:
        """Whether its devices are on several hosts."""
        return self.workload.strategy.devices > (self.workload.cluster.ranks_per_host or 1)

    def on(self, host: Host) -> Workload:
        """The job on other hosts."""
        cluster = self.workload.cluster
        groups = tuple(HostGroup(count=group.count, host=host) for group in cluster.groups[:1])
        return replace(self.workload, cluster=msgspec.structs.replace(cluster, groups=groups))

    @property
    def recorded(self) -> bool:
        """Whether its blocks and exchanges take the times that were recorded, which only factors change."""
        return self.workload.times is not None

    @property
    def small_exchange_us(self) -> float | None:
        """Recorded time of an exchange of a few bytes between all ranks; None: none was recorded."""
        workload = self.workload
        if workload.times is None:
            return None
        placement = placement_of(workload.cluster, range(workload.strategy.devices))
        return workload.times.collective_us("all_reduce", placement, _FEW_BYTES)

    def at_nic_rate(self, share: float) -> Workload:
        """The job with NICs of a part of the rate."""
        if self.recorded:
            return self.scaled(between=1 / share)
        nics = self.host.nics
        assert nics is not None
        cluster: Cluster = self.workload.cluster.at_nic_rate(nics.link.each_way_bps * share, "a possible cause")
        return replace(self.workload, cluster=cluster)

    def scaled(self, **factors: float) -> Workload:
        """The job with parts that take so many times as long."""
        scales = self.workload.scales
        changed: dict[str, Any] = {name: getattr(scales, name) * factor for name, factor in factors.items()}
        return replace(self.workload, scales=replace(scales, **changed))

    def under(self, **settings: Any) -> Workload:  # Any: values of settings of a strategy
        """The job under a changed strategy."""
        return replace(self.workload, strategy=replace(self.workload.strategy, **settings))

    def running(self, runtime: Runtime) -> Workload:
        """The job in a runtime."""
        return replace(self.workload, runtime=runtime)


Model = Callable[[Situation], Iterator[Effect]]
"""The effects of a cause; none where the job cannot have it."""
CAUSES: dict[str, Model] = {}


def _cause(name: str) -> Callable[[Model], Model]:
    def register(model: Model) -> Model:
        CAUSES[name] = model
        return model

    return register


class CauseText(msgspec.Struct, frozen=True, kw_only=True):
    """A cause for people.

    Attributes
    ----------
    title
        Its name in a sentence.
    threads
        How many of the public threads that were read had it (``experiments/questions/causes.toml``).
    also_seen, tells_apart
        Signs of it that no number says, and a look that decides.
    links
        Documentation or threads.
    """

    title: str
    threads: int
    also_seen: str
    tells_apart: str
    links: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def cause_texts() -> Mapping[str, CauseText]:
    """Each cause of `CAUSES`, and "none", by its name."""
    table = tomllib.loads((files("dpro_search.analysis.expect") / "causes.toml").read_text("utf-8"))
    return msgspec.convert(table["causes"], dict[str, CauseText])


def effects_of(name: str, situation: Situation) -> list[Effect]:
    """The effects of a cause on a job; empty where the job cannot have it."""
    try:
        return list(CAUSES[name](situation))
    except InputError:
        return []


# Networks between hosts.


@_cause("half-the-nics")
def _half_the_nics(situation: Situation) -> Iterator[Effect]:
    nics = situation.host.nics
    if situation.several_hosts and nics is not None and math.isfinite(nics.link.each_way_bps):
        for used in sorted({nics.count // 2, nics.count // 4} - {0}, reverse=True):
            yield Effect(words=f"{used} of {nics.count}", replay=situation.at_nic_rate(used / nics.count))


@_cause("wrong-nic-binding")
def _wrong_binding(situation: Situation) -> Iterator[Effect]:
    nics = situation.host.nics
    if situation.several_hosts and nics is not None and nics.count > 1 and math.isfinite(nics.link.each_way_bps):
        yield Effect(words="all ranks through one NIC", replay=situation.at_nic_rate(1 / nics.count))
        yield Effect(words="ranks through NICs of the other socket", replay=situation.at_nic_rate(0.6))


@_cause("tcp-instead-of-rdma")
def _sockets(situation: Situation) -> Iterator[Effect]:
    nics = situation.host.nics
    if not situation.several_hosts or nics is None or not math.isfinite(nics.link.each_way_bps):
        return
    total_bps = nics.count * nics.link.each_way_bps
    for rate_bps in sorted(SOCKET_BPS, reverse=True):
        if rate_bps <= 0.6 * total_bps:
            link = msgspec.structs.replace(nics.link, rate_bps=rate_bps / nics.count, latency_us=SOCKET_LATENCY_US)
            host = msgspec.structs.replace(situation.host, nics=msgspec.structs.replace(nics, link=link, buffers="host"))
            yield Effect(words=f"{rate_bps / 1e9:.0f} Gbit/s a host", replay=situation.on(host), graded=True)


@_cause("no-gpudirect")
def _no_gpudirect(situation: Situation) -> Iterator[Effect]:
    nics = situation.host.nics
    if not situation.on_gpus or not situation.several_hosts or nics is None:
        return
    if nics.buffers == "device" and math.isfinite(nics.link.each_way_bps):
        for share in (0.6, 0.35):
            link = msgspec.structs.replace(nics.link, rate_bps=nics.link.each_way_bps * share)
            host = msgspec.structs.replace(situation.host, nics=msgspec.structs.replace(nics, link=link, buffers="host"))
            yield Effect(words=f"NICs reach {share:.0%}", replay=situation.on(host), graded=True)


@_cause("network-contention")
def _network_contention(situation: Situation) -> Iterator[Effect]:
    if situation.several_hosts:
        for factor in (1.5, 2.5, 5.0):
            yield Effect(
                words=f"transfers between hosts take {factor:g} times as long", replay=situation.scaled(between=factor), graded=True
            )


# Inside a host.


@_cause("pcie-instead-of-nvlink")
def _no_nvlink(situation: Situation) -> Iterator[Effect]:
    host = situation.host
    if host.devices == 1 or not any(link.level == "nvlink" for link in host.links):
        return
    pcie = next((link for link in host.links if link.level == "pcie"), Link(level="pcie", rate_bps=32e9 * 8, latency_us=1.0))
    for words, share in (("peer to peer over PCIe", 0.8), ("through the host's memory", 0.3)):
        link = Link(level="socket", rate_bps=pcie.each_way_bps * share, latency_us=3.0)
        beside = (msgspec.structs.replace(pcie, rate_bps=pcie.each_way_bps * share),) if pcie.devices is not None else ()
        yield Effect(words=words, replay=situation.on(msgspec.structs.replace(host, links=(*beside, link))))


# The host's program.


@_cause("debug-checks")
def _debug_checks(situation: Situation) -> Iterator[Effect]:
    runtime, ranks = situation.workload.runtime, situation.workload.strategy.devices
    if ranks == 1 or runtime.host.check_rank_us:
        return
    small_us = situation.small_exchange_us
    check_rank_us = CHECKED_RANK_US if small_us is None else CHECK_EXCHANGES * small_us / ranks
    yield Effect(replay=situation.running(replace(runtime, host=replace(runtime.host, check_rank_us=check_rank_us))))


@_cause("eager-instead-of-compiled")
def _eager(situation: Situation) -> Iterator[Effect]:
    runtime = situation.workload.runtime
    eager = as_compiled(runtime, compiled=False)
    if FRAMEWORKS[situation.framework].compiles and eager != runtime:
        yield Effect(replay=situation.running(eager))


@_cause("host-bound")
def _host_bound(situation: Situation) -> Iterator[Effect]:
    for factor in (2.0, 4.0, 8.0) if situation.on_gpus else ():  # a core computes what it has started
        yield Effect(
            words=f"the host takes {factor:g} times as long to start work", replay=situation.scaled(host=factor), graded=True
        )


@_cause("input-stalls")
def _input(situation: Situation) -> Iterator[Effect]:
    yield from _stalls(STALLS, {Quantity.STEP, Quantity.MEDIAN_STEP, Quantity.ONE_HOST})


@_cause("checkpoint-in-window")
def _checkpoints(situation: Situation) -> Iterator[Effect]:
    longer = {Quantity.STEP, Quantity.ONE_HOST}  # most steps are as fast as ever
    yield from _stalls((*STALLS, SLOWED_DOWN), longer)  # of a few steps one may take as long as many


def _stalls(factors: tuple[float, ...], longer: Collection[Quantity]) -> Iterator[Effect]:
    """Steps that wait for something outside of them, while no kernel runs."""
    for factor in factors:
        idle = {**dict.fromkeys(longer, factor), Quantity.UTILISATION: 1 / factor, Quantity.POWER: _drawn(factor)}
        yield Effect(words=f"{1 - 1 / factor:.0%} of the time", factors=idle, graded=True)


def _drawn(factor: float) -> float:
    """The power of a device that computes in 1 / factor of the time, over that of one that always does (idle: 0.3)."""
    return 0.3 + 0.7 / factor


# Devices.


@_cause("power-or-thermal-cap")
def _power_cap(situation: Situation) -> Iterator[Effect]:
    for factor in (*SLOWER, SLOWED_DOWN):
        yield Effect(
            words=f"the clock is at {1 / factor:.0%}",
            replay=situation.scaled(compute=factor) if situation.recorded else situation.scaled(matmul=factor, attention=factor),
            factors={Quantity.POWER: 1 / factor},
            graded=True,
        )


@_cause("slow-device-or-host")
def _slow_device(situation: Situation) -> Iterator[Effect]:
    if situation.workload.strategy.devices > 1:
        for factor in SLOWER:
            slower = situation.scaled(compute=factor)
            drawn = {Quantity.POWER: _drawn(factor), Quantity.GEMM: factor}  # the others compute as fast as ever, and wait
            yield Effect(words=f"one takes {factor:g} times as long", replay=slower, factors=drawn, on_one_host=False, graded=True)


@_cause("shared-devices")
def _shared_devices(situation: Situation) -> Iterator[Effect]:
    for factor in (1.25, 2.0, 3.0):
        yield Effect(words=f"kernels take {factor:g} times as long", replay=situation.scaled(compute=factor), graded=True)


# Software and settings.


@_cause("no-flash-attention")
def _unfused(situation: Situation) -> Iterator[Effect]:
    workload = situation.workload
    if workload.runtime.flash_attention and not isinstance(workload.model, Network):
        yield Effect(replay=situation.running(with_attention(workload.runtime, "unfused", situation.device)))


@_cause("recomputation-on")
def _recomputation(situation: Situation) -> Iterator[Effect]:
    if situation.workload.strategy.recompute is not Recompute.FULL:
        yield Effect(replay=situation.under(recompute=Recompute.FULL, recompute_layers=0))


@_cause("wrong-precision")
def _wrong_precision(situation: Situation) -> Iterator[Effect]:
    workload, device = situation.workload, situation.device
    others = {"bf16": ("tf32", "fp32"), "fp16": ("tf32", "fp32"), "tf32": ("fp32",), **dict.fromkeys(NARROW, ("bf16",))}
    for precision in others.get(workload.precision, ()):
        if device.peak_flops_per_s(precision) is not None:
            yield Effect(words=f"in {precision}", replay=replace(workload, precision=precision))


@_cause("fp32-reductions")
def _wide_sums(situation: Situation) -> Iterator[Effect]:
    workload = situation.workload
    if workload.gradient_bytes < 4 and workload.strategy.dp > 1 and workload.strategy.gradient_dtype is None:
        yield Effect(replay=situation.under(gradient_dtype="fp32"))


@_cause("small-micro-batch")
def _small_micro_batch(situation: Situation) -> Iterator[Effect]:
    micro_batch = situation.workload.strategy.micro_batch
    for smaller in sorted({1, micro_batch // 2} - {0, micro_batch}, reverse=True):
        if micro_batch % smaller == 0 and smaller < micro_batch:
            yield Effect(words=f"{smaller} of {micro_batch}", replay=situation.under(micro_batch=smaller))


@_cause("no-overlap")
def _no_overlap(situation: Situation) -> Iterator[Effect]:
    runtime = situation.workload.runtime
    apart = replace(
        runtime,
        overlap_gradients=False,
        overlap_split_gradients=False,
        overlap_gathers=False,
        overlap_sends=False,
        overlap_tensor=False,
    )
    if apart != runtime and situation.workload.strategy.devices > 1:
        yield Effect(replay=situation.running(apart))


@_cause("sums-for-each-micro-batch")
def _sums_often(situation: Situation) -> Iterator[Effect]:
    strategy = situation.workload.strategy
    if strategy.micro_batches > 1 and strategy.dp > 1 and strategy.zero_stage < 2:
        yield Effect(replay=situation.under(zero_stage=2))


@_cause("old-libraries")
def _old_libraries(situation: Situation) -> Iterator[Effect]:
    runtime = situation.workload.runtime
    slower = achieved_by(situation.device).wheels < 1
    if situation.framework in ON_WHEELS and slower and not runtime.kernels.wheels:
        yield Effect(replay=situation.running(replace(runtime, kernels=replace(runtime.kernels, wheels=True))))


@_cause("optimizer-on-host")
def _offloaded(situation: Situation) -> Iterator[Effect]:
    options = options_on(situation.framework, situation.workload.cluster)
    if isinstance(options.get("offload_optimizer"), int) and not situation.workload.strategy.offload_optimizer:
        yield Effect(replay=situation.under(offload_optimizer=True))


@_cause("memory-fragments")
def _fragments(situation: Situation) -> Iterator[Effect]:
    if not situation.on_gpus:
        return
    yield Effect(words="a fifth more memory", factors={Quantity.MEMORY: 1.2}, graded=True)
    longer = dict.fromkeys((Quantity.STEP, Quantity.MEDIAN_STEP), 1.2)
    yield Effect(words="half as much memory again, and retries", factors={Quantity.MEMORY: 1.5, **longer}, graded=True)


@_cause("counted-otherwise")
def _counted(situation: Situation) -> Iterator[Effect]:
    strategy, cluster = situation.workload.strategy, situation.workload.cluster
    tokens = {
        "of one device, not of the job": 1 / strategy.devices,
        "of the job, not of one device": float(strategy.devices),
        "of a host": (cluster.ranks_per_host or 1) / strategy.devices,
        "of one replica of the model": 1 / strategy.dp,
        "of every rank, though some share sequences": float(strategy.tp * strategy.pp * strategy.cp),
        "of one micro-batch, not of the step": 1 / strategy.micro_batches,
        "of steps that are micro-batches": float(strategy.micro_batches),
        "without padding": 0.7,
    }
    flops = {
        "FLOPs of the forward pass alone": 1 / 3,
        "FLOPs that are computed again, too": 4 / 3,
        "a multiply-add as one operation": 0.5,
        "attention whole, though half is masked": 1.15,
    }
    for counted, ways in (("tokens", tokens), ("flops", flops)):
        for words, factor in ways.items():
            if abs(math.log(factor)) > math.log(1.1):
                yield Effect(words=words, counted=factor, counts=counted)
