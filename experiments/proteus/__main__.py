"""``python -m experiments.proteus [--json]``: each job's step with and without interference, and how that changes their order."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from scipy.stats import kendalltau

from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.steps.step_prices import step_us
from experiments.proteus.cases import Case, cases


@dataclass(frozen=True, kw_only=True)
class Result:
    """Both predictions of a job."""

    cluster: str
    model: str
    strategy: str
    plain_ms: float  # Groups exchange alone on their links, and beside compute that they do not slow.
    full_ms: float
    difference_pct: float  # Of the plain one.
    memory_gib: float
    fits: bool
    seconds: float  # To predict once.


def result_of(case: Case) -> Result:
    """Both predictions of a job."""
    started = time.perf_counter()
    full_ms = step_us(case.workload) / 1e3
    seconds = time.perf_counter() - started
    plain_ms = step_us(replace(case.workload, interference=False)) / 1e3
    memory_bytes = peak_memory(case.workload).total_bytes
    return Result(
        cluster=case.cluster,
        model=case.model,
        strategy=case.strategy,
        plain_ms=plain_ms,
        full_ms=full_ms,
        difference_pct=(plain_ms / full_ms - 1) * 100,
        memory_gib=memory_bytes / 2**30,
        fits=memory_bytes <= case.workload.cluster.groups[0].host.device.memory_bytes,
        seconds=seconds,
    )


def order(results: Sequence[Result]) -> float:
    """Agreement of the order of strategies by both predictions (Kendall tau)."""
    return float(kendalltau([one.plain_ms for one in results], [one.full_ms for one in results]).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.proteus", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [result_of(case) for case in cases()]
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in results:
        groups.setdefault((one.cluster, one.model), []).append(one)
    if options.json:
        taus = [{"cluster": cluster, "model": model, "kendall_tau": order(found)} for (cluster, model), found in groups.items()]
        print(json.dumps({"results": [asdict(one) for one in results], "orders": taus}, indent=2))
        return
    print("| cluster | model | strategy | plain, ms | full, ms | difference | memory, GiB |\n|---|---|---|---|---|---|---|")
    for one in results:
        memory = f"{one.memory_gib:.1f}" if one.fits else f"{one.memory_gib:.1f}, out of memory"
        print(
            f"| {one.cluster} | {one.model} | {one.strategy} | {one.plain_ms:.1f} | {one.full_ms:.1f} | {one.difference_pct:+.1f} %"
            f" | {memory} |"
        )
    for (cluster, model), found in groups.items():
        mean, most = (choose(abs(one.difference_pct) for one in found) for choose in (lambda each: float(np.mean(list(each))), max))
        print(f"{cluster}, {model}: plain differs by {mean:.1f} % on average, {most:.1f} % at most; order {order(found):.2f}")
    print(f"{len(results)} jobs, {np.median([one.seconds for one in results]) * 1e3:.0f} ms each (median)")


if __name__ == "__main__":
    main()
