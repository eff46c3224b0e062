"""Exports of plans of described jobs, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpro_search.deploy.export import ExportedFiles, export_plan
from dpro_search.deploy.targets import targets_named
from dpro_search.kinds import job_of, kind_of, load_source
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.parallel.jobs import text


def exported(folder: Path, target: str, settings: dict[str, Any], more: Sequence[str] = (), **values: Any) -> ExportedFiles:
    """The files of a plan in ``folder/plan``, for a target and more of them; `values` are of the job's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(text(None, **values) + "[runs]\n")
    source = load_source(path)
    kind = kind_of(source)
    facts = replace(kind.facts(source), workload=job_of(source).job.workload(Scenario()))
    return export_plan(Plan.of(**settings), folder / "plan", targets_named([target, *more], kind.targets), facts)
