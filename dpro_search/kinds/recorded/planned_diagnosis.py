"""``with_plans(job, facts)``: what the plans of `Job.questions` would gain, beside the what-ifs of an imported trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro_search.kinds._job import Job
from dpro_search.space.plan import Plan


def with_plans(job: Job, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a diagnosis with a row of ``gains`` for each legal plan; ``what_if`` is then what ``--set`` takes.

    Parameters
    ----------
    facts
        Of `kinds.recorded.diagnosis.diagnosis`.
    """
    base_us = float(facts["iteration_us"])
    rows = list(facts["gains"])
    error_us = abs(job.replay_error) * base_us
    for text, plan in job.questions.items():
        if job.space.refusal(plan) is not None or job.space.simplest(plan) == Plan():
            continue
        after_us = job.predict(plan).iteration_us
        gain_us = base_us - after_us
        rows.append(
            {
                "what_if": text,
                "topic": "plan",
                "ranks": [],
                "meaning": f"--set {text}",
                "predicted_iteration_us": after_us,
                "gain_us": gain_us,
                "gain_pct": 100 * gain_us / base_us if base_us > 0 else 0.0,
                "certain": gain_us > error_us,
            }
        )
    return {**facts, "gains": sorted(rows, key=lambda row: -float(row["gain_us"]))}
