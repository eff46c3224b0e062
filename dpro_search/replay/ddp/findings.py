"""What stands out in a DistributedDataParallel job, as sentences with numbers and the knob to turn, the costliest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpro_search.replay.ddp.critical_path import Segment
from dpro_search.replay.sentences import WORTH_PCT, share

COMMON = {
    "bandwidth=2": "A link twice as fast would gain {}.",
    "compute=0.9": "Compute that takes a tenth less on all ranks would gain {}.",
}  # sentences on gains of any job


def findings(path: Sequence[Segment], gains: Sequence[Mapping[str, Any]], iteration_us: float) -> tuple[str, ...]:
    """Sentences on what costs, or would gain, at least 3 % of an iteration.

    Parameters
    ----------
    path
        The critical path of an iteration.
    gains
        Rows of `what_if.gains`.
    iteration_us
        Replayed.
    """
    hook = (
        "Compressing the buckets to half of their bytes (fp16_compress_hook) would gain {}, with what its casts cost; "
        "it changes the numbers."
    )
    low_rank = (
        "Sending factors of rank 1 in place of gradients (PowerSGD) would gain {}, with what computing them costs; it changes the "
        "numbers more than halves do."
    )
    found = [*_communication(path, gains, iteration_us), *late_ranks(path, iteration_us)]
    hooks = {"compression=fp16": hook, "compression=powersgd-1": low_rank}
    return told([*found, *gained(gains, COMMON | hooks, iteration_us)], iteration_us)


def told(found: Iterable[tuple[float, str]], iteration_us: float) -> tuple[str, ...]:
    """Of (cost in us, sentence) those that are worth it, the costliest first."""
    ordered = sorted(found, key=lambda finding: -finding[0])
    return tuple(sentence for cost_us, sentence in ordered if cost_us >= WORTH_PCT / 100 * iteration_us)


def exposed_us(path: Sequence[Segment]) -> dict[str, float]:
    """Time on the critical path of each collective, by its name."""
    exposed: dict[str, float] = {}
    for segment in path:
        if segment.kind == "communication":
            exposed[segment.name] = exposed.get(segment.name, 0.0) + segment.duration_us
    return exposed


def late_ranks(path: Sequence[Segment], iteration_us: float) -> list[tuple[float, str]]:
    """What the others wait for each rank."""
    late: dict[int, float] = {}
    for segment in path:
        if segment.kind == "late_rank":
            late[segment.rank] = late.get(segment.rank, 0.0) + segment.duration_us
    return [
        (
            cost_us,
            f"All ranks wait {share(cost_us, iteration_us)} for rank {rank}: "
            "give it less work, or look at its host and at what else runs on its cores.",
        )
        for rank, cost_us in late.items()
    ]


def gained(gains: Sequence[Mapping[str, Any]], sentences: Mapping[str, str], iteration_us: float) -> list[tuple[float, str]]:
    """The sentences, by what-if question, with what each would gain."""
    return [
        (float(row["gain_us"]), sentences[row["what_if"]].format(share(row["gain_us"], iteration_us)))
        for row in gains
        if row["what_if"] in sentences
    ]


def _communication(path: Sequence[Segment], gains: Sequence[Mapping[str, Any]], iteration_us: float) -> list[tuple[float, str]]:
    exposed = exposed_us(path)
    if not exposed:
        return []
    total_us, largest = sum(exposed.values()), max(exposed, key=lambda name: exposed[name])
    best = next((row for row in gains if str(row["what_if"]).startswith(("bucket_cap_bytes", "first_bucket_bytes"))), None)
    advice = "no other size of buckets would gain anything; a faster link or a compressing hook would"
    if best is not None and best["gain_us"] > 0:
        advice = f"'{best['what_if']}' would gain {share(best['gain_us'], iteration_us)}"
    return [
        (
            total_us,
            f"Communication that nothing hides takes {share(total_us, iteration_us)}, "
            f"{largest} most ({exposed[largest] / 1e3:.1f} ms): {advice}.",
        )
    ]
