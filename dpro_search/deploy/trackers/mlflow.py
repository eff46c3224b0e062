"""MLflow: an experiment ``dpro-search``, a run for the search with the report, and a child run for each plan."""

from __future__ import annotations

import time

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from dpro_search._text import shortened
from dpro_search.deploy.trackers import TrackedSearch

_EXPERIMENT = "dpro-search"
_LONGEST_VALUE = 500  # Characters of a parameter that every store of MLflow takes.


def log(search: TrackedSearch, where: str | None) -> str:
    """Write the runs; `where` is a tracking URI (None: MLflow's default, which MLFLOW_TRACKING_URI sets)."""
    client = MlflowClient(tracking_uri=where)
    known = client.get_experiment_by_name(_EXPERIMENT)
    experiment = client.create_experiment(_EXPERIMENT) if known is None else known.experiment_id
    parent = client.create_run(experiment, run_name=search.name).info.run_id
    client.log_batch(parent, params=[Param(name, shortened(value, _LONGEST_VALUE)) for name, value in search.facts.items()])
    client.log_artifact(parent, str(search.page))
    now_ms = int(time.time() * 1000)
    for plan in search.plans:
        child = client.create_run(experiment, run_name=plan.name).info.run_id
        client.log_batch(
            child,
            metrics=[
                Metric(name, value, now_ms, step) for name, values in plan.metrics.items() for step, value in enumerate(values)
            ],
            params=[Param(name, shortened(value, _LONGEST_VALUE)) for name, value in plan.parameters.items()],
            tags=[RunTag("mlflow.parentRunId", parent)],
        )
        client.set_terminated(child)
    client.set_terminated(parent)
    return f"MLflow, experiment {_EXPERIMENT}, run {search.name} ({parent})"
