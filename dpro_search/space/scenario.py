"""`Scenario`: one question about a job: a plan, another cluster, parts that are faster or slower; and how it is written as text.

Whatever changes a job has a name and a unit, and the same text everywhere: ``--set``, ``--what-if``, the Python API, the rows of
`diagnose`:

    fusion_threshold_bytes=16MiB  cycle_time_us=5ms  servers=4  p3=on           settings of a `Plan`
    ranks=64  cores=2  rate=200gbit  recorded_on=dgx-1-v100                     the cluster
    global_batch=512  sequence=8192  precision=fp8                              the training, of a job that was written down
    precision=bf16                                                              of a profile of a GPU, too
    speeds=1:1:2:3  delay=20ms  target_loss=0.3                                 workers of unequal speed, trained to a loss
    compute=0.9  rank1.compute=0.9  bandwidth=2  communication=0                scales of what was recorded
    matmul=1.1  attention=1.1  memory=0.9  inside=1.2  between=1.3  checks=0    parts of a described job's step
    launch=0  loading=0  kernels.gemm=0.5  collectives.all_reduce=0  compile=1  where kernels and their launches were recorded
    unknown=0                                                                   where time is left that nothing explains
    module.Net_0.Block_1=0.5                                                    where modules were recorded
    batch=2                                                                     twice the batch of a profile
    measured=17.8ms                                                             a step of a profile, measured without profiler
    rank3=usual  ranks0+1+2.communication=0.5                                   one of several ranks; collectives of a group
    stages=even                                                                 pipeline stages that compute equally long
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from dpro_search._text import numbers_text
from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.errors import InputError
from dpro_search.quantities import (
    parse_count,
    parse_counts,
    parse_number,
    parse_rate_bps,
    parse_size_setting,
    parse_switch,
    parse_time_setting,
)
from dpro_search.runtime.schemes.pace import parse_speeds
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.plan import Plan, setting_types

ScaledPart = Literal[
    "compute",
    "bandwidth",
    "communication",
    "matmul",
    "attention",
    "memory",
    "inside",
    "between",
    "checks",
    "host",
    "launch",
    "loading",
    "kernels",
    "collectives",
    "module",
    "usual",
    "compile",
    "stages",
    "unknown",
    "batch",
]
CLUSTER_SETTINGS = ("ranks", "cores", "rate", "recorded_on", "speeds", "delay")
SCALES = ("compute", "bandwidth", "communication")
STEP_SCALES = ("matmul", "attention", "memory", "inside", "between", "checks")  # Parts of a described job's step.
_USUAL = "rankN"  # what `rank3=usual` is called where settings are listed
_GROUP = re.compile(r"ranks(?P<ranks>\d+(?:\+\d+)+)\.communication=(?P<factor>[0-9.]+)x?")
_OF_A_SORT = ("kernels", "collectives", "module")
OP_SCALES = ("host", "launch", "loading", "unknown", "kernels", "collectives", "module", "compile", "stages", "batch", _USUAL)
_SCALE = re.compile(
    r"(?:rank(?P<rank>\d+)\.)?(?P<what>compute|bandwidth|communication|matmul|attention|memory|inside|between|checks|host|launch|loading|unknown|compile|batch|(?:kernels|collectives|module)(?=\.))"
    r"(?:\.(?P<only>(?<=module\.)[\w.]+|[a-z_]+))?=(?P<factor>[0-9.]+)x?"
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A part of the job that takes another time."""

    text: str  # As it was written.
    # what, factor: "bandwidth" is that many times as high; all else takes that many times as long: "compute", "communication",
    # parts of a described job's step (`STEP_SCALES`, see `parallel.costs.scales.Scales`),
    # "host" (what host threads do), "launch" (what they do between two launches, but for loading, and each launch), "loading" (of
    # input), "kernels" and "collectives" of one sort, "module" (what devices do for one). "usual": the ops of a rank take the time
    # that they usually take on the others. "compile": kernels that a compiler fuses take that many times as long as their longest.
    # "stages": stages of a pipeline compute equally long.
    # "unknown": time of devices that nothing in the recording explains.
    what: ScaledPart
    factor: float
    rank: int | None = None  # The only rank that changes; None: all.
    only: str | None = None  # The sort of kernels or collectives, or the module.
    group: tuple[int, ...] | None = None  # The only ranks among which collectives change; None: all.

    @property
    def of_unknown(self) -> Scale:
        """How time that nothing explains changes, if it is of the part that this scale is about.

        A change that is no factor (one rank like the others, compilation) may take all of it away.
        """
        factor = {"bandwidth": 1 / self.factor if self.factor > 0 else 1.0, "usual": 0.0, "compile": 0.0, "unknown": 1.0}
        return Scale(text=self.text, what="unknown", factor=factor.get(self.what, self.factor), rank=self.rank)

    @property
    def needs_ops(self) -> bool:
        """Whether it is about single ops, so that a job needs their launches or groups."""
        return self.what not in SCALES or self.group is not None

    def check_rank(self, ranks: int) -> None:
        """Raise `InputError` if a job of so many ranks has none of this number."""
        if any(rank is not None and rank >= ranks for rank in (self.rank, *(self.group or ()))):
            raise InputError(f"'{self.text}': the trace has ranks 0 to {ranks - 1}")

    def at(self, numbers: Sequence[int]) -> Scale:
        """The scale with places in place of ranks; raises `InputError` if one is not among the recorded ranks' `numbers`."""
        place = {number: position for position, number in enumerate(numbers)}
        named_ranks = (*(() if self.rank is None else (self.rank,)), *(self.group or ()))
        if any(number not in place for number in named_ranks):
            several = len(numbers) > 1
            raise InputError(f"'{self.text}': the trace has {'ranks' if several else 'rank'} {numbers_text(numbers)}")
        return replace(
            self,
            rank=None if self.rank is None else place[self.rank],
            group=None if self.group is None else tuple(place[number] for number in self.group),
        )

    @staticmethod
    def parse(text: str) -> Scale:
        """Read ``compute=0.9``, ``rank1.compute=0.9``, ``kernels.gemm=0.5``, ``rank3=usual``...; else raise `InputError`."""
        if usual := re.fullmatch(r"rank(\d+)=usual", text.strip()):
            return Scale(text=text, what="usual", factor=1.0, rank=int(usual[1]))
        if text.strip() == "stages=even":
            return Scale(text=text, what="stages", factor=1.0)
        if among := _GROUP.fullmatch(text.strip()):
            group = tuple(sorted({int(rank) for rank in among["ranks"].split("+")}))
            return Scale(text=text, what="communication", factor=_number(text, among["factor"]), group=group)
        match = _SCALE.fullmatch(text.strip())
        if (
            not match
            or (match["rank"] and match["what"] in ("bandwidth", "batch"))
            or (match["only"] and match["what"] not in _OF_A_SORT)
        ):
            raise InputError(
                f"'{text}': write compute=0.9, rank1.compute=0.9, bandwidth=2 or communication=0 (of a profile with kernels also "
                "launch=0, loading=0, host=0.9, kernels.gemm=0.5, collectives.all_reduce=0, rank3=usual)"
            )
        factor = _number(text, match["factor"])
        if match["what"] in ("bandwidth", "batch") and factor <= 0:
            raise InputError(f"'{text}': the factor must be above 0")
        what: ScaledPart = match["what"]  # type: ignore[assignment]
        return Scale(text=text, what=what, factor=factor, rank=int(match["rank"]) if match["rank"] else None, only=match["only"])


@dataclass(frozen=True, kw_only=True)
class ClusterChange:
    """Changes of the cluster; None leaves a property as recorded."""

    machines: Cluster | None = None  # A cluster in place of the recorded one; what follows changes it further.
    # ranks, cores: Number of ranks (None with `machines`: one on each of their devices), and of the cores that they share.
    ranks: int | None = None
    cores: int | None = None
    rate_bps: float | None = None  # Link rate per host and direction in bits a second; `math.inf`: no limit.
    recorded_on: Cluster | None = None  # What a profile of GPUs was recorded on; None: what the trace says.
    # speeds, delay_us: Of workers of unequal speed, each one's, where the slowest recorded one has 1; what links add to a message.
    speeds: tuple[float, ...] | None = None
    delay_us: float | None = None

    def applied(self, recorded: ClusterSpec) -> ClusterSpec:
        """The changed cluster; raises `InputError` if the machines have fewer devices than ranks are asked for, or TPUs."""
        self._refuse_tpus()
        if self.machines is None:
            return recorded.changed(ranks=self.ranks, cores=self.cores, rate_bps=self.rate_bps)
        return spec_on(self.machines, self.ranks).spec.changed(cores=self.cores, rate_bps=self.rate_bps)

    def target(self, recorded: ClusterSpec) -> ClusterSpec:
        """The cluster of a job that was recorded on another; raises `InputError` if it cannot be that."""
        return spec_on(self.gpu_machines, self.ranks).spec if self.on_gpus else self.applied(recorded)

    @property
    def gpu_machines(self) -> Cluster:
        """Machines with GPUs, with the changed rate; raises `InputError` for a change of cores."""
        assert self.machines is not None, "on GPUs"
        if self.cores is not None:
            raise InputError(f"cores={self.cores}: ranks on {self.machines.name} have a GPU each; leave cores out")
        if self.rate_bps is None:
            return self.machines
        return self.machines.at_nic_rate(None if math.isinf(self.rate_bps) else self.rate_bps, "given as rate=")

    def then(self, later: ClusterChange) -> ClusterChange:
        """This change, and a later one that counts where both change the same."""
        values = {field.name: getattr(later, field.name) for field in fields(later)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks are on other devices than processors, where what was measured of communication does not hold.

        Raises `InputError` for TPUs: predictions for GPUs do not hold there either.
        """
        self._refuse_tpus()
        return self.machines is not None and any(group.host.device.kind != "cpu" for group in self.machines.groups)

    def _refuse_tpus(self) -> None:
        if self.machines is not None and self.machines.has_tpus:
            raise InputError(f"{self.machines.name} has TPUs: this kind of job has no cost model for TPUs yet")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Properties of the machines that predictions do not know, a sentence each."""
        return () if self.machines is None else spec_on(self.machines, self.ranks).left_out


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job under a plan, on another cluster, with other speeds. The empty scenario is the job as recorded."""

    plan: Plan = field(default_factory=Plan)  # Changes of strategy.
    # The plan under which a described job runs to begin with, which `plan` changes; None: as its file says.
    begins_with: Plan | None = None
    groups: int | None = None  # So many contiguous tensor groups in place of the plan's; None: the plan's.
    # global_batch, sequence, precision: Sequences or samples of a step over all replicas, tokens of a sequence, and the precision
    # of matmuls; None: as they are.
    global_batch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    cluster: ClusterChange = field(default_factory=ClusterChange)  # Changes of the cluster.
    scales: tuple[Scale, ...] = ()  # Changes of speed, in the order in which they apply.
    target_loss: float | None = None  # Of a job that is trained to a loss; None: as recorded.
    # Of a profiled job: what a step takes without the profiler, which makes host threads slower; None: as in the profile.
    measured_us: float | None = None

    def on(self, cluster: str | Cluster | None) -> Scenario:
        """The scenario on a cluster, or one named like "16xhgx-h100" or a TOML file (`cluster.parse_cluster`); None: as it is."""
        if cluster is None:
            return self
        machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        return replace(self, cluster=replace(self.cluster, machines=machines))

    def then(self, later: Scenario) -> Scenario:
        """This scenario, and a later one that counts where both change the same; scales apply one after the other."""
        values = {field.name: getattr(later, field.name) for field in fields(later)}
        values |= {"scales": (*self.scales, *later.scales), "cluster": self.cluster.then(later.cluster)}
        return replace(self, **{name: value for name, value in values.items() if value is not None and value != Plan()})

    def changed(self, texts: Iterable[str], *, known: Collection[str], job: str) -> Scenario:
        """The scenario with changes written as ``name=value``, in order.

        Parameters
        ----------
        known
            What can be changed about the job: names of settings of a plan, "groups", "global_batch", "sequence", "precision",
            `CLUSTER_SETTINGS`, `SCALES`,
            `OP_SCALES`.
        job
            What the kind of job is called in errors: "a Horovod job".

        Raises
        ------
        InputError
            A name that the job does not have (with the nearest one that it has), or a value that cannot be read.
        """
        scenario = self
        for text in texts:
            for part in changes_in(text):
                scenario = scenario._with(part, known, job)
        return scenario

    def _with(self, text: str, known: Collection[str], job: str) -> Scenario:
        name, equals, value = (piece.strip() for piece in text.partition("="))
        setting = _USUAL if re.fullmatch(r"rank\d+|ranks[\d+]+\.communication", name) else re.sub(r"^rank\d+\.", "", name)
        if setting.startswith(tuple(f"{sort}." for sort in _OF_A_SORT)):
            setting = setting.partition(".")[0]
        if not equals and setting in known:
            raise InputError(f"'{text}': no value; write {name}=VALUE")
        if setting not in known:
            near = difflib.get_close_matches(setting, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"'{text}': {job} has no knob '{setting}'{hint} (known: {', '.join(known)})")
        if setting in (*SCALES, *STEP_SCALES, *OP_SCALES):
            return replace(self, scales=(*self.scales, Scale.parse(f"{name}={value}")))
        try:
            if setting == "groups":
                return replace(self, groups=parse_count(value))
            if setting in ("global_batch", "sequence"):
                return replace(self, **{setting: parse_count(value)})  # type: ignore[arg-type]
            if setting == "precision":
                return replace(self, precision=value)
            if setting == "rate":
                rate_bps = parse_rate_bps(value)
                return replace(self, cluster=replace(self.cluster, rate_bps=float("inf") if rate_bps is None else rate_bps))
            if setting == "ranks":
                return replace(self, cluster=replace(self.cluster, ranks=parse_count(value)))
            if setting == "speeds":
                return replace(self, cluster=replace(self.cluster, speeds=parse_speeds(value)))
            if setting == "delay":
                return replace(self, cluster=replace(self.cluster, delay_us=parse_time_setting(value)))
            if setting == "target_loss":
                return replace(self, target_loss=parse_number(value))
            if setting == "measured":
                return replace(self, measured_us=parse_time_setting(value))
            if setting == "recorded_on":
                return replace(self, cluster=replace(self.cluster, recorded_on=parse_cluster(value)))
            if setting == "cores":
                return replace(self, cluster=replace(self.cluster, cores=parse_count(value)))
            return replace(self, plan=self.plan.changed(**{setting: readers()[setting](value)}))
        except InputError as error:
            raise InputError(f"{name}={value}: {error}") from error


def changes_in(text: str) -> list[str]:
    """The changes in a text that may hold several: "tp=8,pp=2"; a comma within parentheses is a part of a value."""
    return re.split(r"\s*,\s*(?=[a-z])(?![^()]*\))", text.strip())


def readers() -> dict[str, Callable[[str], Any]]:
    """How the value of each setting is read from text, by its name and type; names as "a+b", lists of lists not at all."""
    reader_of: dict[str, Callable[[str], Any]] = {}
    for name, hint in setting_types().items():
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
        if name.endswith("_bytes"):
            reader_of[name] = parse_size_setting
        elif name.endswith("_us"):
            reader_of[name] = parse_time_setting
        elif bool in kinds:
            reader_of[name] = parse_switch
        elif int in kinds:
            reader_of[name] = parse_count
        elif float in kinds:
            reader_of[name] = parse_number
        elif typing.get_origin(kinds[0]) is Literal:
            reader_of[name] = _one_of(typing.get_args(kinds[0]))
        elif typing.get_args(kinds[0]) == (int, ...):
            reader_of[name] = parse_counts
        elif typing.get_args(kinds[0]) == (str, ...):
            reader_of[name] = _names
        elif str in kinds:
            reader_of[name] = str
    return reader_of


def _names(text: str) -> tuple[str, ...]:
    """Names of modules: ``layers.0+layers.1``."""
    return tuple(filter(None, text.split("+")))


def _one_of(values: Sequence[str | int]) -> Callable[[str], str | int]:
    known = {str(value): value for value in values}

    def read(text: str) -> str | int:
        if text not in known:
            raise InputError(f"'{text}' is none of {', '.join(known)}")
        return known[text]

    return read


def _number(text: str, factor: str) -> float:
    try:
        return float(factor)
    except ValueError as error:
        raise InputError(f"'{text}': '{factor}' is not a number") from error
