"""`JOBS`, the faults that are injected into them, and the cases of a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from experiments.parallel.cases import CONFIGS, SEQUENCE

HEALTHY = "none"
_HEALTHY_CASES, _CASES_OF_CAUSE = 8, 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """A described job of two ranks, each on a host and a core of its own."""

    model: str  # One of `CONFIGS`.
    rate: str  # Rate of a NIC.
    nics: int = 1  # NICs of a host.
    batch: int = 16
    micro_batch: int
    zero_stage: int = 0

    def write(self, folder: Path, times: str, *, hosts: int = 2) -> Path:
        """The files that describe the job on so many hosts, each with as many sequences; returns its ``job.toml``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[self.model]))
        cluster = [f'name = "{hosts} hosts"', f"hosts = {hosts}", "devices = 1", "[device]"]
        cluster += ['name = "one CPU core"', 'vendor = "any"', 'kind = "cpu"', 'source = "this machine"']
        cluster += ["[nic]", f"count = {self.nics}", f'rate = "{self.rate}"', 'latency = "25us"']
        cluster += ["[source]", 'all = "this machine"']
        (folder / "cluster.toml").write_text("\n".join(cluster) + "\n")
        job = ['model = "config.json"', 'cluster = "cluster.toml"', f"global_batch = {self.batch * hosts // 2}"]
        job += [f"sequence = {SEQUENCE}", 'precision = "fp32"', 'framework = "pytorch-gloo"', f'times = "{times}"']
        job += ["[runs]", f"micro_batch = {self.micro_batch}", f"zero_stage = {self.zero_stage if hosts > 1 else 0}"]
        path = folder / "job.toml"
        path.write_text("\n".join(job) + "\n")
        return path


JOBS: Mapping[str, Job] = {
    "gpt": Job(model="gpt", rate="500mbit", micro_batch=4),
    "gpt, large micro-batch": Job(model="gpt", rate="2gbit", micro_batch=8),
    "gpt, four micro-batches": Job(model="gpt", rate="1gbit", micro_batch=2),
    "gpt, FSDP2": Job(model="gpt", rate="2gbit", batch=8, micro_batch=1, zero_stage=3),
    "llama": Job(model="llama", rate="1gbit", micro_batch=4),
    "llama, two NICs": Job(model="llama", rate="250mbit", nics=2, micro_batch=8),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run; by default nothing is wrong.

    Attributes
    ----------
    words
        How much of it.
    rate_share
        The rate of the links over that which is described.
    cpus
        Quota of each host, in cores; empty: none.
    programs
        Other programs that compute on each core.
    niceness
        Of these programs: a lower priority leaves more of the core.
    env
        Variables of all ranks.
    settings
        What the job runs under in place of what is described.
    stall_share, pause_shares
        Each step begins so much later, and every fourth one as well, as shares of a healthy step.
    counts_one_rank
        Whether the reported rate is that of one rank.
    """

    words: str = ""
    rate_share: float = 1.0
    cpus: tuple[float, ...] = ()
    programs: int = 0
    niceness: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""
    stall_share: float = 0.0
    pause_shares: float = 0.0
    counts_one_rank: bool = False

    @property
    def shows_on_one_host(self) -> bool:
        """Whether a job on one host alone, a healthy one, may show it."""
        return self.rate_share == 1.0 and not self.env and len(set(self.cpus)) < 2 and not self.counts_one_rank

    @property
    def slows_cores(self) -> bool:
        """Whether it takes processor time from the ranks, which must compute to show it; else they wait in place of computing."""
        return bool(self.cpus or self.programs)

    @property
    def shows_in_exchanges(self) -> bool:
        """Whether an all-reduce alone may show it."""
        return self.rate_share != 1.0 or self.slows_cores


_ANY = tuple(JOBS)
_WITH_SUMS = ("gpt", "llama", "llama, two NICs")
FAULTS: Mapping[str, tuple[tuple[str, ...], tuple[Fault, ...]]] = {
    "network-contention": (
        _WITH_SUMS,
        tuple(Fault(words=f"rate divided by {by:g}", rate_share=1 / by) for by in (1.7, 2.5, 4.0)),
    ),
    "half-the-nics": (("llama, two NICs",), (Fault(words="1 of 2", rate_share=0.5),)),
    "debug-checks": (("gpt, FSDP2",), (Fault(words="DETAIL", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),)),
    "input-stalls": (_ANY, tuple(Fault(words=f"{share:.0%} of a step", stall_share=share) for share in (0.35, 0.6, 1.0))),
    "checkpoint-in-window": (
        _ANY,
        tuple(Fault(words=f"{share:g} steps, every fourth one", pause_shares=share) for share in (1.6, 2.4, 4.0)),
    ),
    "power-or-thermal-cap": (_ANY, tuple(Fault(words=f"{cpus:g} cores each", cpus=(cpus, cpus)) for cpus in (0.7, 0.5, 0.35))),
    "slow-device-or-host": (_ANY, tuple(Fault(words=f"one of {cpus:g} cores", cpus=(1.0, cpus)) for cpus in (0.65, 0.5, 0.35))),
    "shared-devices": (
        _ANY,
        (
            Fault(words="a program of low priority", programs=1, niceness=3),
            Fault(words="a program", programs=1),
            Fault(words="two programs", programs=2),
        ),
    ),
    "recomputation-on": (_ANY[:3] + _ANY[4:], (Fault(words="all layers", settings="recompute=full"),)),
    "small-micro-batch": (("gpt, large micro-batch", "llama, two NICs"), (Fault(words="1 of 8", settings="micro_batch=1"),)),
    "sums-for-each-micro-batch": (("gpt, four micro-batches",), (Fault(words="ZeRO-2", settings="zero_stage=2"),)),
    "counted-otherwise": (_ANY, (Fault(words="tokens of one rank", counts_one_rank=True),)),
}
"""Jobs and severities by cause. What a quota does to a core is what a lower clock does: the same work takes longer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job with a fault; `cause` is the fault's name in `analysis.expect.causes.CAUSES`, or `HEALTHY`."""

    number: int
    job: str
    cause: str
    fault: Fault

    @property
    def paced(self) -> bool:
        """Whether ranks wait in place of computing, as long as their blocks were recorded; half of the healthy jobs do."""
        return self.number % 2 == 0 if self.cause == HEALTHY else not self.fault.slows_cores


def cases(seed: int) -> Iterator[Case]:
    """Three cases of each cause and eight healthy ones, in random order; job and severity are drawn."""
    draw = random.Random(seed)
    drawn = [(HEALTHY, draw.choice(_ANY), Fault()) for _ in range(_HEALTHY_CASES)]
    for cause, (jobs, severities) in FAULTS.items():
        drawn += [(cause, draw.choice(jobs), draw.choice(severities)) for _ in range(_CASES_OF_CAUSE)]
    draw.shuffle(drawn)
    for number, (cause, job, fault) in enumerate(drawn):
        yield Case(number=number, job=job, cause=cause, fault=fault)
