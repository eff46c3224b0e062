"""Gains of other settings of Horovod, in addition to the questions of every job."""

from __future__ import annotations

from dpro_search.kinds._predictor import Gains
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.space.plan import Plan


def gains(predictor: Predictor, plan: Plan | None = None) -> Gains:
    """Iteration time and gain of each question, largest gain first.

    Those that a variable of the environment answers have it as ``knob``.
    """
    knobs = _knobs(plan or Plan())
    variables = {text: variable for text, variable, _ in knobs}
    rows = predictor.gains({text: changed for text, _, changed in knobs}, plan)
    return [row | ({"knob": variables[name]} if (name := str(row["what_if"])) in variables else {}) for row in rows]


def questions() -> dict[str, Plan]:
    """The same settings, as changes of the recorded ones."""
    return {text: plan for text, _, plan in _knobs(Plan())}


def _knobs(plan: Plan) -> list[tuple[str, str, Plan]]:
    """Settings of Horovod that are worth a look: (option of ``replay --set``, variable, plan)."""
    settings = []
    for mib in (1, 8, 64):
        threshold = mib * 2**20
        changed = plan.changed(fusion_threshold_bytes=threshold, tensor_groups=None)
        settings.append((f"fusion_threshold_bytes={threshold}", f"HOROVOD_FUSION_THRESHOLD={threshold}", changed))
    for cycle_ms in (1, 10):
        changed = plan.changed(cycle_time_us=cycle_ms * 1000.0)
        settings.append((f"cycle_time_us={cycle_ms * 1000}", f"HOROVOD_CYCLE_TIME={cycle_ms}", changed))
    return settings
