"""Facts made by hand, small enough to be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import numpy as np

from dpro_search.analysis.predict import Replay
from dpro_search.analysis.search import PlanRow, SearchAnswer
from dpro_search.deploy.losses import Equivalence
from dpro_search.deploy.validate import MeasuredPlan, Validation
from dpro_search.kinds import Diagnosis, Term
from dpro_search.kinds._diagnosis import CriticalOp, PredictedGain, RankFacts
from dpro_search.replay.path.segments import PathSegment
from dpro_search.report import PageFacts
from dpro_search.report.quality import HeldOutStep
from dpro_search.report.timeline import Lane, StepTimeline
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.tensor_groups import Group, TensorGroups

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\"><svg onload='alert(3)'>",
    "<!-- --> ]]> &amp; &lt;b&gt;",
    "gemm\u202e\u2066reversed\u2069",
    "zero\u200bwidth\x00null\x1b[31m",
    "half \ud800 pair",
    "javascript:alert(4)",
)


def plan(
    number: int, predicted_us: float, baseline_us: float = 100e3, *, certain: bool = True, memory: int | None = 2**30
) -> PlanRow:
    return PlanRow(
        number=number,
        plan={"fusion_threshold_bytes": number + 1},
        name=f"threshold {number + 1}",
        predicted_iteration_us=predicted_us,
        interval_us=(predicted_us * 0.95, predicted_us * 1.05),
        peak_memory_bytes=memory,
        speedup=baseline_us / predicted_us,
        gain_certain=certain,
        infeasible=None,
    )


def search(*plans: PlanRow) -> SearchAnswer:
    return SearchAnswer(
        run="runs/made",
        trials=4,
        seconds=2.0,
        stopped="finished",
        baseline_us=100e3,
        baseline_interval_us=(95e3, 105e3),
        best_us=plans[0].predicted_iteration_us,
        speedup=plans[0].speedup,
        gain_certain=plans[0].gain_certain,
        worth_measuring=False,
        feasible=True,
        workers_lost=0,
        plans=plans,
        pareto=(),
        beats=(),
        calibration=None,
        recording_doubt=None,
        reasons=(),
    )


def baseline(infeasible: str | None = None) -> Prediction:
    """The prediction of the recorded setting of `search`."""
    return Prediction(
        iteration_us=100e3,
        interval_us=(95e3, 105e3),
        breakdown_us={},
        peak_memory_bytes=None,
        source="recorded",
        settled=True,
        infeasible=infeasible,
    )


def validation(speedup: float, *, beyond_noise: bool) -> Validation:
    row = MeasuredPlan(
        plan=Plan.of(fusion_threshold_bytes=1),
        predicted_us=80e3,
        interval_us=(76e3, 84e3),
        measured_us=100e3 / speedup,
        spread_us=500.0,
        error_pct=1.0,
        speedup_predicted=1.25,
        speedup_measured=speedup,
        speedup_interval=(speedup - 0.02, speedup + 0.02),
        beyond_noise=beyond_noise,
        losses=losses("same", "first 20 losses agree within 0.0001"),
    )
    return Validation(baseline_us=100e3, baseline_predicted_us=100e3, baseline_error_pct=0.0, noise_pct=1.5, rounds=2, plans=(row,))


def losses(verdict: Literal["same", "different"], reason: str) -> Equivalence:
    return Equivalence(verdict=verdict, reason=reason, compared=20, difference=None, tolerance=None)


def trials() -> list[dict[str, Any]]:
    rows = [(100e3, 30), (90e3, 40), (95e3, 20), (80e3, 50)]
    return [
        {
            "number": number,
            "origin": "auto",
            "iteration_us": us,
            "peak_memory_bytes": mib * 2**20,
            "infeasible": None,
            "name": f"trial plan {number}",
        }
        for number, (us, mib) in enumerate(rows)
    ]


def timeline(slices: int = 40, ranks: int = 2) -> StepTimeline:
    """Back-to-back ops on a lane for each rank and side, and a collective over the second half."""
    lanes = []
    for rank in range(ranks):
        for measured in (False, True):
            lane = Lane(rank=rank, measured=measured, name="stream")
            starts = np.linspace(0, 100e3, slices, endpoint=False).tolist()
            for number, start in enumerate(starts):
                lane.add(f"op {number}@{rank}", "compute" if number % 2 else "backward", start, 80e3 / slices)
            moves = Lane(rank=rank, measured=measured, name="communication")
            moves.add(f"all-reduce@{rank}", "comm", 50e3, 45e3)
            lanes += [lane, moves]
    return StepTimeline(lanes=tuple(lanes), step=3)


def segment(kind: str, rank: int, start_us: float, duration_us: float) -> PathSegment:
    """A stretch of a critical path of 100 ms."""
    share_pct = duration_us / 1e3
    return PathSegment(kind=kind, rank=rank, name="", start_us=start_us, duration_us=duration_us, share_pct=share_pct)


def facts(name: str = "made", op: str = "gemm@0") -> PageFacts:
    """A recording of two ranks; `op` is the name of whatever has one."""
    parts = {"compute": 60e3, "contention": 10e3, "exposed_communication": 30e3}
    return PageFacts(
        name=name,
        replay=Replay(
            measured_us=98e3,
            iteration_us=100e3,
            error_pct=2.0,
            interval_us=(95e3, 105e3),
            breakdown_us={},
            peak_memory_bytes=None,
            ops=10,
            replay_seconds=0.1,
            settled=True,
            unplaced={},
            calibration=None,
        ),
        diagnosis=Diagnosis(
            iteration_us=100e3,
            measured_iteration_us=98e3,
            critical_path=(segment("compute", 0, 0.0, 60e3), segment("collective", -1, 60e3, 40e3)),
            critical_ops=(CriticalOp(op=op, rank=0, kind="COMM", share_pct=40.0, reason="dependency", count=1, total_us=40e3),),
            ranks=tuple(
                RankFacts(rank=rank, host=f"host {op}", breakdown_us=parts, last_pct=50.0, waited_us=100.0) for rank in (0, 1)
            ),
            gains=(PredictedGain(what_if=op, predicted_iteration_us=70e3, gain_us=30e3),),
            findings=(f"Look at {op}.",),
            warnings=(),
        ),
        timeline=timeline(),
        groups=TensorGroups(
            groups={"as recorded": [Group(tensors=(op, "b"), size_bytes=1000)], "plan 0": [Group(tensors=(op,), size_bytes=400)]}
        ),
        held_out=[HeldOutStep(step=2, measured_us=100e3, predicted_us=103e3)],
        terms=[Term(name=op, value="1 ms", meaning=op)],
        provenance=[("trace", op), ("command of the job", op)],
        notes=(op,),
    )


def hostile_facts(op: str) -> PageFacts:
    """Facts in which every text that comes from a file is `op`."""
    lane = Lane(rank=0, measured=True, name=op)
    lane.add(op, "compute", 0.0, 90e3)
    row = msgspec.structs.replace(plan(0, 80e3), name=op)
    return replace(
        facts(op, op),
        timeline=StepTimeline(lanes=(lane,), step=0),
        search=search(row),
        trials=[trial | {"name": op, "origin": op} for trial in trials()],
        validation=validation(1.2, beyond_noise=True),
    )
