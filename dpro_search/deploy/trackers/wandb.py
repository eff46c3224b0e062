"""Weights & Biases: a group with the name of the search, a run for each plan, and the report as an artefact of the first one.

``WANDB_MODE=offline`` writes files that ``wandb sync`` sends later.
"""

from __future__ import annotations

import wandb

from dpro_search.deploy.trackers import TrackedSearch

_PROJECT = "dpro-search"


def log(search: TrackedSearch, where: str | None) -> str:
    """Write the runs into a project, `where` (None: ``dpro-search``)."""
    project = where or _PROJECT
    for plan in search.plans:
        configuration = {**plan.parameters, "search": dict(search.facts)}
        run = wandb.init(
            project=project, group=search.name, name=f"{search.name}-{plan.name}", config=configuration, settings={"silent": True}
        )
        for step in range(max(map(len, plan.metrics.values()))):
            run.log({name: values[step] for name, values in plan.metrics.items() if step < len(values)})
        if plan is search.plans[0]:
            page = wandb.Artifact(f"{search.name}-report", type="report")
            page.add_file(str(search.page))
            run.log_artifact(page)
        run.finish()
    wandb.teardown()  # ends the process that writes, so that the last run's file is whole
    return f"Weights & Biases, project {project}, group {search.name}"
