"""Schedules of disturbances, drawn from a seed, and how an answer is scored against them. The analysis never sees a schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

WARM_UP, SLOW, HEALTHY = 45, 22, 30  # steps
VERDICT = 20  # steps within which a verdict must have been given

JOBS: dict[str, dict[str, Any]] = {
    "ddp-4": {"kind": "ddp", "ranks": 4, "hosts": 4, "blocks": 4, "block_us": 4000, "width": 192, "step_us": 60_000},
    "ddp-16": {"kind": "ddp", "ranks": 16, "hosts": 4, "blocks": 2, "block_us": 16_000, "width": 320, "step_us": 140_000},
    "fsdp-4": {"kind": "fsdp", "ranks": 4, "hosts": 4, "blocks": 3, "block_us": 6000, "width": 192, "step_us": 90_000},
    "pipeline-4": {"kind": "pipeline", "ranks": 4, "hosts": 4, "blocks": 1, "block_us": 3000, "width": 192, "step_us": 110_000},
    "pipeline-2x4": {"kind": "pipeline", "ranks": 8, "hosts": 4, "blocks": 1, "block_us": 4000, "width": 192, "step_us": 140_000},
}
_MORE = {"input_us": 2000, "stages": 4, "micro_batches": 6, "rows": 256}


def job_of(name: str, seed: int, cases: int) -> dict[str, Any]:
    """A job with so many cases: a healthy beginning, then disturbed and healthy steps in turn."""
    job = {**JOBS[name], **_MORE, "seed": seed}
    draws = random.Random(f"{name} {seed}")
    per_host = job["ranks"] // job["hosts"]
    kinds = ["compute", "input", "link", "jitter", "two", "change"] + (["host"] if per_host > 1 else [])
    order = [kinds[place % len(kinds)] for place in range(cases)]
    draws.shuffle(order)
    schedule: list[dict[str, Any]] = []
    step = WARM_UP
    for number, kind in enumerate(order):
        parts = _case(kind, job, per_host, draws)
        for rounds in parts:
            schedule += [{**each, "case": number, "title": kind, "first": step, "end": step + SLOW} for each in rounds]
            step += SLOW
        step += HEALTHY
    return {**job, "schedule": schedule, "steps": step}


def _case(kind: str, job: dict[str, Any], per_host: int, draws: random.Random) -> list[list[dict[str, Any]]]:
    """Disturbances of one case: those at once, period by period."""
    if kind == "two":
        first, second = draws.sample(range(job["ranks"]), 2)
        return [[_one(draws.choice(("compute", "input")), [rank], draws) for rank in (first, second)]]
    if kind == "change":
        first, second = draws.sample(range(job["ranks"]), 2)
        return [[_one(draws.choice(("compute", "input")), [rank], draws)] for rank in (first, second)]
    if kind in ("host", "link"):
        host = draws.randrange(job["hosts"])
        return [[_one(kind, list(range(host * per_host, (host + 1) * per_host)), draws)]]
    return [[_one(kind, [draws.randrange(job["ranks"])], draws)]]


def _one(kind: str, ranks: list[int], draws: random.Random) -> dict[str, Any]:
    """A disturbance of a drawn size: a share of compute or of a step, for a link the factor by which its rate falls."""
    low, high = {"compute": (0.25, 0.8), "host": (0.25, 0.8), "input": (0.15, 0.5), "jitter": (0.5, 0.8), "link": (8, 16)}[kind]
    return {"kind": kind, "ranks": ranks, "size": draws.uniform(low, high), "share": 0.6}


def score(job: dict[str, Any], changes: Sequence[tuple[int, Any]]) -> tuple[list[dict[str, Any]], list[tuple[int, Any]]]:
    """Each period of the schedule with what the answer was 20 steps after its begin, and findings in healthy steps."""
    periods: dict[int, list[dict[str, Any]]] = {}
    for each in job["schedule"]:
        periods.setdefault(each["first"], []).append(each)
    rows = []
    for first, parts in sorted(periods.items()):
        truth = {(part["kind"], tuple(part["ranks"])) for part in parts}
        answer = set(_answer_at(changes, first + VERDICT - 1))
        who = {rank for _, ranks in truth for rank in ranks} == {rank for _, ranks in answer for rank in ranks}
        rows.append({"first": first, "title": parts[0]["title"], "truth": truth, "answer": answer, "who": who})
    alarms = [
        (step, set(new) - set(old))
        for (_, old), (step, new) in zip([(0, ()), *changes], changes, strict=False)
        if set(new) - set(old)
    ]
    quiet = [
        (step, new) for step, new in alarms if all(not (each["first"] <= step < each["end"] + VERDICT) for each in job["schedule"])
    ]
    return rows, quiet


def _answer_at(changes: Sequence[tuple[int, Any]], step: int) -> Any:
    earlier = [findings for at, findings in changes if at <= step]
    return earlier[-1] if earlier else ()
