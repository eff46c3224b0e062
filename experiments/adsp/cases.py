"""`Case`: one training of the campaign; ``EXPERIMENTS`` lists those of each experiment of the paper."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from dpro_search.runtime.schemes import Pace, parse_paces
from experiments.adsp.emulate import CHECK_S
from experiments.adsp.workloads import WORKLOADS

STEP_S = 0.045  # of a worker of speed 1
COMMIT_S = 0.0225
SPEEDS = "1:1:2:3"  # the paper's kind of mix
QUOTAS = "0.25:0.25:0.5:0.75"  # the same of two cores, of which a little is left for the server and the checks
SEEDS = range(5)
SERVER_SCHEMES = ("bsp", "ssp(staleness=3)", "asp", "adacomm(steps=8, adapt_s=3)", "fixed-adacomm(steps=8)", "adsp")
COLLECTIVE_SCHEMES = ("local-sgd(steps=8)", "diloco(steps=8)", "accumulation")
_SWEPT = ("bsp", "asp", "adacomm(steps=8, adapt_s=3)", "fixed-adacomm(steps=8)", "adsp")
_SWEPT_SEEDS = range(3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Attributes
    ----------
    varied
        The value of what its experiment varies, for the table.
    speeds
        Of the workers, as in "1:1:2:3".
    slower_from_s
        The last worker takes the steps of speed 1 from then on; None: its speed stays.
    quotas
        CPU quotas of the workers, in cores, as in "0.25:0.5", which make them as fast as they are; empty: they are paced.
    check_s
        Seconds between checks of the loss.
    """

    experiment: str
    workload: str
    scheme: str
    seed: int
    varied: str = ""
    speeds: str = SPEEDS
    step_s: float = STEP_S
    commit_s: float = COMMIT_S
    batch: int | None = None
    slower_from_s: float | None = None
    quotas: str = ""
    check_s: float = CHECK_S

    @property
    def key(self) -> str:
        """What identifies it in a journal."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def cpus(self) -> tuple[float, ...]:
        """Quotas of its workers; empty: they are paced."""
        return tuple(map(float, self.quotas.split(":"))) if self.quotas else ()

    @property
    def paces(self) -> tuple[Pace, ...]:
        """Those of its workers."""
        found = parse_paces(self.speeds, step_s=self.step_s, commit_s=self.commit_s)
        if self.slower_from_s is None:
            return found
        return (*found[:-1], replace(found[-1], changes=((self.slower_from_s, self.step_s),)))


def _convergence() -> Iterable[Case]:
    """The time to the target of every scheme on the paper's kind of mix; waiting times are in the same runs."""
    for seed, workload, scheme in itertools.product(SEEDS, WORKLOADS, (*SERVER_SCHEMES, *COLLECTIVE_SCHEMES)):
        yield Case(experiment="convergence", workload=workload, scheme=scheme, seed=seed)


def _calibration() -> Iterable[Case]:
    """Runs that the convergence model is fitted on: three schemes, workers of equal speed."""
    for seed, workload, scheme in itertools.product((100, 101), WORKLOADS, ("bsp", "asp", "fixed-adacomm(steps=8)")):
        yield Case(experiment="calibration", workload=workload, scheme=scheme, seed=seed, speeds="2:2:2:2")


def _swept(experiment: str, changes: Iterable[tuple[str, dict[str, object]]], schemes: Iterable[str] = _SWEPT) -> Iterable[Case]:
    for seed, (varied, change), scheme in itertools.product(_SWEPT_SEEDS, list(changes), list(schemes)):
        case = Case(experiment=experiment, workload="digits-mlp", scheme=scheme, seed=seed, varied=varied)
        yield replace(case, **change)


def _mixes() -> list[tuple[str, dict[str, object]]]:
    """By degree: mean speed by smallest speed."""
    mixes = ("1:1:1:1", "1:1:1.5:2", "1:1:2:3", "1:1:3:5", "1:1:5:9")
    degrees = [sum(map(float, mix.split(":"))) / 4 for mix in mixes]
    return [(f"{degree:g}", {"speeds": mix}) for degree, mix in zip(degrees, mixes, strict=True)]


def _heterogeneity() -> Iterable[Case]:
    return _swept("heterogeneity", _mixes())


def _picked() -> Iterable[Case]:
    """Schemes among which `search` picks on these mixes, beside those of the experiment before."""
    return _swept("picked", _mixes(), ("fixed-adacomm(steps=32)", "adsp(commits=1)", "adsp(commits=2)"))


def _workers() -> Iterable[Case]:
    return _swept("workers", [(str(4 * n), {"speeds": ":".join([SPEEDS] * n)}) for n in (1, 2, 4)])


def _delay() -> Iterable[Case]:
    return _swept("delay", [(f"{1000 * s:g} ms", {"commit_s": s}) for s in (0.0, 0.0225, 0.045, 0.09, 0.18)])


def _batch() -> Iterable[Case]:
    """The step takes as much longer as the batch is larger."""
    return _swept("batch", [(str(n), {"batch": n, "step_s": STEP_S * n / 16}) for n in (8, 16, 32, 64)])


def _changing() -> Iterable[Case]:
    return _swept("changing speed", [("steady", {}), ("slower after 4 s", {"slower_from_s": 4.0})])


def _quotas() -> Iterable[Case]:
    """The mix by quotas of a control group in place of paces, with a step of some tens of milliseconds; real time only."""
    case = Case(experiment="quotas", workload="digits-resnet", scheme="", seed=0, batch=256, quotas=QUOTAS, check_s=1.0)
    return [replace(case, scheme=scheme) for scheme in ("bsp", "asp", "fixed-adacomm(steps=8)", "adsp")]


def _search() -> Iterable[Case]:
    return _swept("search", [("", {})], ("adsp", *(f"adsp(commits={n})" for n in (1, 2, 4, 8))))


EXPERIMENTS = {
    "convergence": _convergence,
    "calibration": _calibration,
    "heterogeneity": _heterogeneity,
    "picked": _picked,
    "workers": _workers,
    "delay": _delay,
    "batch": _batch,
    "changing": _changing,
    "search": _search,
    "quotas": _quotas,
}


def cases(names: Iterable[str]) -> list[Case]:
    """Those of some experiments, in their order."""
    return [case for name in names for case in EXPERIMENTS[name]()]
