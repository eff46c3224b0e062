"""What stands out in an imported trace: sentences with numbers and what to do, each from a gain that the replay confirms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpro_search.graph.bus_bandwidth import GroupSpeed, slow_groups
from dpro_search.kinds._recorded_questions import Answer
from dpro_search.quantities import time_text
from dpro_search.replay.device_time import RankTime
from dpro_search.replay.sentences import WORTH_PCT

_PARTS = ("compute", "exposed_communication", "waiting_for_ranks", "host_bound", "transfer")
_SENTENCES = {
    "launch": "Host-bound: devices are idle for {host_bound:.0f} % of an iteration because nothing was launched; use CUDA graphs, "
    "torch.compile or larger batches{unmeasured}.",
    "loading": "The training thread loads its input, or waits for it; use more num_workers of the DataLoader, pin_memory and "
    "prefetching.",
    "communication": "Communication that nothing hides takes {exposed_communication:.0f} % of an iteration ({hidden:.0f} % of "
    "the transfers are hidden); {advice}, or a faster link.",
    "rank": "Rank {ranks} takes longer than the others; ranks wait {waiting_for_ranks:.0f} % of an iteration for each other. Look "
    "at its host, its input and its clocks.",
    "kernels": "Devices compute for {compute:.0f} % of an iteration, and these kernels decide most of it; try lower precision, "
    "fused kernels or torch.compile.",
    "module": "One module decides much of an iteration; look at its kernels first.",
    "link": "Slow link: {collective} among ranks {ranks} reaches {reached:.1f} Gbit/s a link, the other groups {usual:.1f}. Look "
    "at these ranks' links and NCCL_IB_HCA or NCCL_SOCKET_IFNAME, or place them closer together.",
}
_UNMEASURED = " (the profiler slows the host: give a step without it, --set measured=TIME)"
_SHARDED = "try prefetching more units, keeping parameters after the forward pass (FSDP's reshard_after_forward), larger units"
_PASSED_ON = "try more micro-batches or another pipeline schedule"
_ADVICE = {
    "all_reduce": "try other buckets (DDP's bucket_cap_mb), compression (a communication hook)",
    "all_gather": _SHARDED,
    "reduce_scatter": _SHARDED,
    "all_to_all": "try to overlap the exchange with other batches' computation (TorchRec's train pipelines), a more even sharding, "
    "fewer bytes",
    "send": _PASSED_ON,
    "recv": _PASSED_ON,
}
_ANY_ADVICE = "try to overlap it with computation, fewer bytes"


def findings(
    times: Sequence[RankTime],
    answers: Sequence[Answer],
    iteration_us: float,
    speeds: Sequence[GroupSpeed] = (),
    collective: str = "",
    *,
    profiled: bool = True,
) -> tuple[str, ...]:
    """Sentences on what would gain at least 3 % of an iteration, the largest gain first; each names the what-if that repeats it.

    Parameters
    ----------
    times
        Of every rank.
    answers
        Of the questions about the job.
    iteration_us
        Replayed, in us.
    speeds
        Of every group of ranks.
    collective
        The type of collective that takes longest; advice is about the type that would gain most, where several were asked about.
    profiled
        Whether host threads are as slow as the profiler made them.
    """
    shares = _shares(times, iteration_us) | {"advice": _ADVICE.get(_decisive(answers) or collective, _ANY_ADVICE)}
    shares["unmeasured"] = _UNMEASURED if profiled else ""
    found: dict[str, Answer] = {}
    for answer in sorted(answers, key=lambda answer: -answer.gain_us):
        if answer.topic in _SENTENCES and answer.gain_pct >= WORTH_PCT:
            found.setdefault(answer.topic, answer)
    return tuple(
        f"{_SENTENCES[topic].format(**shares, **_about(answer, speeds))} With {answer.meaning}: "
        f"{time_text(answer.predicted_iteration_us)} an iteration, {time_text(answer.gain_us)} ({answer.gain_pct:.1f} %) less "
        f"(--what-if {answer.what_if})."
        for topic, answer in found.items()
    )


def _decisive(answers: Sequence[Answer]) -> str:
    """The type of collective that gains most if it is free; empty: none was asked about."""
    of_types = [answer for answer in answers if answer.topic == "collectives"]
    best = max(of_types, key=lambda answer: answer.gain_us, default=None)
    return "" if best is None else best.what_if.removeprefix("collectives.").removesuffix("=0")


def _shares(times: Sequence[RankTime], iteration_us: float) -> dict[str, Any]:
    """Parts of an iteration in percent, mean over ranks; also of the transfers' time, that in which the rank computes."""
    whole_us = max(iteration_us * len(times), 1e-9)
    found = {part: sum(getattr(row, f"{part}_us") for row in times) / whole_us * 100 for part in _PARTS}
    moving, exposed = found["transfer"], found["exposed_communication"]
    return found | {"hidden": max(1 - exposed / moving, 0.0) * 100 if moving > 0 else 0.0}


def _about(answer: Answer, speeds: Sequence[GroupSpeed]) -> dict[str, object]:
    """The ranks that an answer is about, and what their links reach."""
    ranks = ", ".join(map(str, answer.ranks))
    slow = next(((speed, usual_bps) for speed, usual_bps in slow_groups(speeds) if speed.ranks == answer.ranks), None)
    if slow is None:
        return {"ranks": ranks}
    return {"ranks": ranks, "collective": slow[0].collective, "reached": slow[0].bus_bps / 1e9, "usual": slow[1] / 1e9}
