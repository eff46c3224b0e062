"""A machine that runs a program of launches, waits and host work, and writes the profile that Kineto would have written of it.

It is written without the replay in mind: plain loops over the program, one host thread, streams in order, launches that take effect
after a latency. Tests compare a replay of a changed profile with the profile of the changed program.

Its kernels may vary (`jitter_us`), and what it writes may be less than what it did: launches as a CUDA graph show no order between
streams, and a host that polls makes no call that waits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kineto_files import START, Profile

LATENCY_US, CALL_US = 6.0, 4.0


@dataclass(frozen=True)
class Launch:
    """Work of the host, then the launch of a kernel on a stream, which may have to wait for another stream."""

    name: str
    host_us: float
    kernel_us: float
    stream: int = 7
    waits_for: int | None = None


@dataclass(frozen=True)
class Synchronize:
    """Work of the host, then a wait for all that was launched on a stream, and what the profile shows of it."""

    host_us: float
    stream: int = 7
    shown_as: str = "cudaStreamSynchronize"  # a call; "queries" or "ops" in a row; "op" that launches too; "": nothing


Program = list[Launch | Synchronize]


def scaled(program: Program, *, kernels: float = 1.0, host: float = 1.0) -> Program:
    """The program of a job with faster or slower kernels or host."""
    return [
        replace(item, host_us=item.host_us * host, kernel_us=item.kernel_us * kernels)
        if isinstance(item, Launch)
        else replace(item, host_us=item.host_us * host)
        for item in program
    ]


def run_graph(program: Sequence[Launch], steps: int, *, jitter_us: float = 0.0, seed: int = 0) -> tuple[Profile, list[float]]:
    """The same for launches that were captured in a CUDA graph: one call launches them all, and no call lets a stream wait.

    A call that waits for the device ends a step.
    """
    profile, draw, now, ends = Profile(), random.Random(seed), float(START), []
    for number in range(steps):
        begin, launched = now, now + 10
        free: dict[int, float] = {}
        correlation = profile.call("cudaGraphLaunch", launched, 20)
        for item in program:
            ready = max(launched + 50, *(free.get(stream, 0.0) + 2 for stream in (item.stream, item.waits_for or item.stream)))
            ends_at = ready + item.kernel_us + draw.uniform(0, jitter_us)
            profile.kernel(item.name, ready, ends_at - ready, stream=item.stream, correlation=correlation)
            free[item.stream] = ends_at
        now = max(free.values()) + 5
        profile.call("cudaDeviceSynchronize", launched + 30, now - launched - 30)
        profile.step(number, begin, now - begin - 0.5)
        ends.append(max(free.values()))
    return profile, ends


def show_wait(profile: Profile, wait: Synchronize, now: float, until: float) -> None:
    """Write what a profile shows of a wait."""
    if wait.shown_as == "op":
        profile.op("experts::read_counts", now - 8, until - now + 8)
    elif wait.shown_as in ("queries", "ops"):
        poll_us = (until - now) / 20
        for i in range(20):
            each = (now + (i + 0.1) * poll_us, 0.9 * poll_us)
            if wait.shown_as == "ops":
                profile.op("aten::item", *each)
                profile.op("aten::_local_scalar_dense", each[0] + 0.1 * poll_us, 0.7 * poll_us)
            else:
                profile.call("cudaEventQuery", *each)
    elif wait.shown_as:
        profile.call(wait.shown_as, now, until - now)


def run(
    program: Program, steps: int, *, jitter_us: float = 0.0, host_jitter_us: float = 0.0, seed: int = 0
) -> tuple[Profile, list[float]]:
    """The profile of some steps that all run the program, and the ends of the steps on the device."""
    profile, draw = Profile(), random.Random(seed)
    now = float(START)
    free: dict[int, float] = {}
    ends = []
    for number in range(steps):
        begin = now
        for item in program:
            now += item.host_us + draw.uniform(0, host_jitter_us)
            if isinstance(item, Synchronize):
                until = max(now, free.get(item.stream, now)) + CALL_US + draw.uniform(0, host_jitter_us)
                show_wait(profile, item, now, until)
                now = until
                continue
            ready = max(now + LATENCY_US + (1 if item.waits_for is not None else 0), free.get(item.stream, 0.0))
            if item.waits_for is not None:
                profile.call("cudaStreamWaitEvent", now, 1)
                now += 1
                ready = max(ready, free.get(item.waits_for, 0.0))
            kernel_us = item.kernel_us + draw.uniform(0, jitter_us)
            profile.kernel(item.name, ready, kernel_us, launched=now, stream=item.stream, call_us=CALL_US)
            now += CALL_US
            free[item.stream] = ready + kernel_us
        profile.step(number, begin, now - begin - 0.5)
        ends.append(max(free.values()))
    return profile, ends
