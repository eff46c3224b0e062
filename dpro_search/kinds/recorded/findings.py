"""Findings about an imported trace: sentences with numbers and advice, each from a gain that the replay confirms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from dpro_search.graph.recorded_collectives import GroupSpeed, slow_groups
from dpro_search.kinds.recorded.questions import Answer
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.quantities import time_text
from dpro_search.replay.device_time import RankTime
from dpro_search.replay.sentences import WORTH_PCT

_PARTS = ("compute", "exposed_communication", "waiting_for_ranks", "host_bound", "transfer")
_SENTENCES = {
    "launch": "Host-bound: devices are idle for {host_bound:.0f} % of an iteration because nothing was launched; use CUDA graphs, "
    "torch.compile or larger batches (--what-if batch=2){unmeasured}.",
    "loading": "The training thread loads its input, or waits for it; use more num_workers of the DataLoader, pin_memory and "
    "prefetching.",
    "communication": "Communication that nothing hides takes {exposed_communication:.0f} % of an iteration ({hidden:.0f} % of "
    "the transfers are hidden); {advice}, or a faster link.",
    "rank": "Rank {ranks} takes longer than the others; ranks wait {waiting_for_ranks:.0f} % of an iteration for each other. Look "
    "at its host, its input and its clocks.",
    "kernels": "Devices compute for {compute:.0f} % of an iteration, and these kernels decide most of it; try lower precision, "
    "fused kernels or torch.compile.",
    "stages": "The stages of the pipeline are uneven: of an iteration, ranks {ranks} compute for {slow} and the others for "
    "{usual_stage} on average. Move layers from these ranks to the others; the last stage also computes the loss.",
    "module": "One module decides much of an iteration; look at its kernels first.",
    "link": "Slow link: {collective} among ranks {ranks} reaches {reached:.1f} Gbit/s a link, the other groups {usual:.1f}. Look "
    "at these ranks' links and NCCL_IB_HCA or NCCL_SOCKET_IFNAME, or place them closer together.",
}
_NOT_CERTAIN = " The gain is not certain: the replay of the recorded setting is off by more than that."
_MOST = 0.5  # share of what steps that stall cost, from which on one cause explains them
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
_OF_REPLICAS = (
    "try to overlap the exchange of gradients and parameters among replicas with the pipeline's passes (Megatron-LM's "
    "--overlap-grad-reduce and --overlap-param-gather)"
)
_COMPILED_BY_XLA = {
    "launch": "Host-bound: devices are idle for {host_bound:.0f} % of an iteration because nothing was launched; put more of the "
    "step into one jitted function (several steps in one jax.lax.scan), dispatch without waiting for results, or use larger "
    "batches{unmeasured}.",
    "kernels": "Devices compute for {compute:.0f} % of an iteration, and these kernels decide most of it; try lower precision or "
    "larger batches; XLA has fused what it can.",
    "loading": "The training thread loads its input, or waits for it; prefetch batches to the device while the step before runs.",
}  # in place of what PyTorch's users can do
_ANY_ADVICE = "try to overlap it with computation, fewer bytes"


def findings(
    times: Sequence[RankTime],
    answers: Sequence[Answer],
    iteration_us: float,
    speeds: Sequence[GroupSpeed] = (),
    collective: str = "",
    *,
    profiled: bool = True,
    stalls: bool = False,
    framework: str = "",
    pipeline: bool = False,
) -> tuple[str, ...]:
    """Sentences on unknown time, and on what would gain at least 3 % of an iteration, the largest gain first, with its what-if.

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
    stalls
        Whether some steps stall, so that gains are those of the mean iteration.
    framework
        What ran the job, as the trace names it: advice is about its knobs.
    pipeline
        Whether ranks pass activations to each other. Then all-gathers and reduce-scatters are not those of a sharded model.
    """
    advice = _ADVICE.get(_decisive(answers) or collective, _ANY_ADVICE)
    if pipeline and advice == _SHARDED:
        advice = _OF_REPLICAS
    sentences = _SENTENCES | (_COMPILED_BY_XLA if framework == "xla" else {})
    shares = _shares(times, iteration_us) | {"advice": advice}
    shares["unmeasured"] = _UNMEASURED if profiled else ""
    answer_of_topic: dict[str, Answer] = {}
    for answer in sorted(answers, key=lambda answer: -answer.gain_us):
        if answer.topic == "loading" and stalls:
            continue  # it is part of the finding about these steps (`stall_findings`)
        if answer.topic in _SENTENCES and answer.gain_pct >= WORTH_PCT:
            answer_of_topic.setdefault(answer.topic, answer)
    unknown_us = sum(row.unknown_us for row in times) / max(len(times), 1)
    unknown = unknown_time(unknown_us, iteration_us) if answers else ""  # Without answers, a warning says what is missing.
    gained = (
        f"{sentences[topic].format(**shares, **_about(answer, speeds, times))} With {answer.meaning}: "
        f"{_iteration(answer, average=stalls)}, {time_text(answer.gain_us)} ({answer.gain_pct:.1f} %) less "
        f"(--what-if {answer.what_if}).{'' if answer.certain else _NOT_CERTAIN}"
        for topic, answer in answer_of_topic.items()
    )
    return (*filter(None, [unknown]), *gained)


def unknown_time(unknown_us: float, iteration_us: float) -> str:
    """A sentence on the part of an iteration that nothing in the recording explains; empty if it is too short to matter."""
    share_pct = unknown_us / max(iteration_us, 1e-9) * 100
    if share_pct < WORTH_PCT:
        return ""
    return (
        f"Unknown: for {time_text(unknown_us)} of an iteration ({share_pct:.0f} %), no launch, kernel or wait in the recording "
        "explains what the devices do. The interval of a what-if holds both answers: this time changes with the rest, or it stays."
    )


def _iteration(answer: Answer, *, average: bool) -> str:
    return (
        f"{time_text(answer.predicted_mean_us if average else answer.predicted_iteration_us)} an iteration{' on average' * average}"
    )


def stall_findings(replay: RecordedReplay, answers: Sequence[Answer]) -> Iterator[str]:
    """A sentence on steps that stall now and then, which the median does not show; nothing if none exist.

    Parameters
    ----------
    replay
        The job without changes.
    answers
        Of the questions about the job: if most of the difference goes away with input loading, that is what the steps wait for.
    """
    (stalled, steps), base = replay.measured.stalled, replay.iterations()
    if not stalled or not replay.stalls or base.mean_us is None:
        return
    loading = next((answer for answer in answers if answer.topic == "loading"), None)
    lost_us = base.mean_us - base.iteration_us
    begin = (
        f"{stalled} of {steps} steps stall: the median step takes {time_text(base.iteration_us)}, but the mean step "
        f"{time_text(base.mean_us)}."
    )
    if loading is not None and loading.gain_us >= _MOST * lost_us:
        yield (
            f"{begin} In steps that stall the training thread waits for its input; use more num_workers of the DataLoader, "
            f"prefetching or a faster storage. With {loading.meaning}: {_iteration(loading, average=True)}, "
            f"{time_text(loading.gain_us)} ({loading.gain_pct:.1f} %) less (--what-if {loading.what_if})."
        )
    else:
        yield (
            f"{begin} Look at what runs only in those steps (checkpoints, evaluation, input, garbage collection). If no step "
            f"stalled: {time_text(base.iteration_us)} an iteration, {time_text(lost_us)} ({lost_us / base.mean_us:.1%}) less."
        )


def _decisive(answers: Sequence[Answer]) -> str:
    """The type of collective that gains most if it is free; empty: none was asked about."""
    of_types = [answer for answer in answers if answer.topic == "collectives"]
    best = max(of_types, key=lambda answer: answer.gain_us, default=None)
    return "" if best is None else best.what_if.removeprefix("collectives.").removesuffix("=0")


def _shares(times: Sequence[RankTime], iteration_us: float) -> dict[str, Any]:
    """Parts of an iteration in percent, mean over ranks; also of the transfers' time, that in which the rank computes."""
    whole_us = max(iteration_us * len(times), 1e-9)
    shares = {part: sum(getattr(row, f"{part}_us") for row in times) / whole_us * 100 for part in _PARTS}
    moving, exposed = shares["transfer"], shares["exposed_communication"]
    return shares | {"hidden": max(1 - exposed / moving, 0.0) * 100 if moving > 0 else 0.0}


def _about(answer: Answer, speeds: Sequence[GroupSpeed], times: Sequence[RankTime]) -> dict[str, object]:
    """The ranks that an answer is about, what their links reach, and how long they and the others compute."""
    ranks = ", ".join(map(str, answer.ranks))
    if answer.topic == "stages":
        slow_us = [row.compute_us for row in times if row.rank in answer.ranks]
        usual_us = [row.compute_us for row in times if row.rank not in answer.ranks]
        return {"ranks": ranks, "slow": time_text(fmean(slow_us)), "usual_stage": time_text(fmean(usual_us))}
    slow = next(((speed, usual_bps) for speed, usual_bps in slow_groups(speeds) if speed.ranks == answer.ranks), None)
    if slow is None:
        return {"ranks": ranks}
    return {"ranks": ranks, "collective": slow[0].collective, "reached": slow[0].bus_bps / 1e9, "usual": slow[1] / 1e9}
