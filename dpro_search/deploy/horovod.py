"""Export of a `Plan` to a stock Horovod job, for callers that know no other target."""

from __future__ import annotations

from pathlib import Path

from dpro_search.deploy.export import ExportedFiles, export_plan
from dpro_search.deploy.parts.horovod import horovod_environment
from dpro_search.deploy.targets import Target
from dpro_search.space.plan import Plan

__all__ = ["export_horovod", "horovod_environment"]


def export_horovod(plan: Plan, out: Path) -> ExportedFiles:
    """Write the folder `out` for Horovod alone: always ``horovod.env``; with exact groups also ``groups.json`` and ``tape.py``."""
    return export_plan(plan, out, (Target.HOROVOD,))
