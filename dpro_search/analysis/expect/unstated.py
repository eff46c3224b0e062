"""`possible_jobs`: the jobs that a description may mean, where it leaves settings open that decide time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dpro_search.errors import InputError
from dpro_search.parallel.file.description import ParallelDescription
from dpro_search.parallel.frameworks import FRAMEWORKS, Attention, with_attention
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import CapturedModel, Network
from dpro_search.parallel.strategy import Recompute
from dpro_search.parallel.workload import Workload
from dpro_search.quantities import size_text


@dataclass(frozen=True, kw_only=True)
class PossibleJobs:
    """The job that is most probably meant, others that may be, and sentences on what was not said."""

    likely: Workload
    others: tuple[Workload, ...]
    assumptions: tuple[str, ...]


def possible_jobs(description: ParallelDescription, workload: Workload, changed: frozenset[str]) -> PossibleJobs:
    """The jobs that a description may mean.

    A job that ran did fit in memory. One that would not fit without recomputation, of which nothing is said, computes activations
    again.

    Parameters
    ----------
    changed
        Settings that somebody named beside the description.
    """
    others, assumptions = list[Workload](), list[str]()
    limit_bytes = description.device.memory_bytes
    needed_bytes = peak_memory(workload).total_bytes
    for words, alternative in _alternatives(description, workload, changed):
        if not _fits(alternative, limit_bytes):
            continue
        if limit_bytes and needed_bytes > limit_bytes and not others:
            assumptions.append(f"{words} is not said; without it the job would not fit in memory, so that it is taken for granted")
            workload, needed_bytes = alternative, peak_memory(alternative).total_bytes
            continue
        assumptions.append(f"{words} is not said: the interval holds both")
        others.append(alternative)
    if limit_bytes and needed_bytes > limit_bytes:
        assumptions.append(
            f"as it is described the job does not fit in memory: it needs {size_text(needed_bytes)} of {size_text(limit_bytes)}"
        )
    return PossibleJobs(likely=workload, others=tuple(others), assumptions=tuple(assumptions))


def _alternatives(description: ParallelDescription, workload: Workload, changed: frozenset[str]) -> Iterator[tuple[str, Workload]]:
    if isinstance(workload.model, Network | CapturedModel) or description.is_recorded:
        return
    strategy, runs = workload.strategy, description.runs
    open_recompute = (description.chosen or runs.recompute is None) and "recompute" not in changed
    if open_recompute:
        other = Recompute.NONE if strategy.recompute is Recompute.FULL else Recompute.FULL
        yield (
            "whether activations are computed again",
            replace(workload, strategy=replace(strategy, recompute=other, recompute_layers=0)),
        )
    if description.keys.attention is None and FRAMEWORKS[description.framework].compiles:
        kernel: Attention = "sdpa" if workload.runtime.kernels.stores_scores else "unfused"
        try:
            runtime = with_attention(workload.runtime, kernel, description.device)
        except InputError:
            return
        yield "the kernel of attention", replace(workload, runtime=runtime)


def _fits(workload: Workload, limit_bytes: float | None) -> bool:
    try:
        check_strategy(workload.strategy, workload.model, workload.sequence)
    except InputError:
        return False
    return not limit_bytes or peak_memory(workload).total_bytes <= limit_bytes
