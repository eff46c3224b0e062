"""`track`: a search in an experiment tracker, where people keep their results: MLflow, Weights & Biases, TensorBoard.

Each plan becomes a run of the tracker: its settings are parameters, its prediction and every measurement are metrics. The report
page is an artefact beside them. A tracker is a module here with a function ``log(search, where)``; its package is an extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from dpro_search.deploy.measured_plans import MeasuredTimes, measured_plans
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.search import SearchResult
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan, Prediction

TRACKERS = ("mlflow", "wandb", "tensorboard")


@dataclass(frozen=True, kw_only=True)
class TrackedPlan:
    """A plan as a run of a tracker.

    Attributes
    ----------
    name
        "plan-1", or "plan-0" for the setting without a plan.
    parameters
        Its settings, as text.
    metrics
        Values by name, in the order in which they were measured; units are part of names.
    """

    name: str
    parameters: Mapping[str, str]
    metrics: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class TrackedSearch:
    """A search with its plans; `name` is that of its folder, `facts` say what was searched, `page` is the report."""

    name: str
    facts: Mapping[str, str]
    plans: Sequence[TrackedPlan]
    page: Path


def track(run: Path, page: Path, to: str) -> str:
    """Write a run folder into a tracker.

    Parameters
    ----------
    page
        The report of the run, an HTML file.
    to
        The tracker, and where it is: ``mlflow:http://host:5000``, ``mlflow:sqlite:///mlflow.db``, ``wandb:PROJECT``,
        ``tensorboard:FOLDER``. Without a place the tracker's own default counts.

    Returns
    -------
    str
        Where the runs are, for people.

    Raises
    ------
    InputError
        There is no such tracker, or a file of the run folder is damaged.
    MissingCapabilityError
        The tracker's package is not installed, or the tracker cannot be reached.
    """
    name, _, where = to.partition(":")
    if name not in TRACKERS:
        raise InputError(f"--to {to}: known are {', '.join(TRACKERS)}, with a place like tensorboard:runs/board")
    search = _tracked(run, page)
    try:
        return str(import_module(f"dpro_search.deploy.trackers.{name}").log(search, where or None))
    except ModuleNotFoundError as error:
        raise MissingCapabilityError(f"--to {name}: {error.name} is not installed; pip install 'dpro-search[{name}]'") from error
    except InputError:
        raise
    except Exception as error:  # Trackers raise errors of their own for places that cannot be reached or written.
        reason = " ".join(str(error).split())
        raise MissingCapabilityError(f"--to {to}: the tracker did not take the run ({type(error).__name__}: {reason})") from error


def _tracked(run: Path, page: Path) -> TrackedSearch:
    info, result, measured = read_run(run), SearchResult.load(run), measured_plans(run)
    plans = [("plan-0", Plan(), result.baseline)]
    plans += [(f"plan-{number}", ranked.plan, ranked.prediction) for number, ranked in enumerate(result.plans, 1)]
    facts = {"trace": info.trace, "trace_digest": info.trace_digest, "sampler": info.sampler, "created": info.created}
    return TrackedSearch(
        name=run.resolve().name,
        facts=facts | ({"cluster": info.cluster.name} if info.cluster is not None else {}),
        plans=[
            TrackedPlan(
                name=name,
                parameters={key: str(value) for key, value in plan.settings.items()},
                metrics=dict(_metrics(prediction, result.baseline, measured.get(plan))),
            )
            for name, plan, prediction in plans
        ],
        page=page,
    )


def _metrics(prediction: Prediction, baseline: Prediction, times: MeasuredTimes | None) -> Iterator[tuple[str, Sequence[float]]]:
    yield "predicted_step_time_s", [prediction.iteration_us / 1e6]
    for end, us in zip(("low", "high"), prediction.interval_us, strict=True):
        yield f"predicted_step_time_{end}_s", [us / 1e6]
    yield "predicted_speedup", [baseline.iteration_us / prediction.iteration_us]
    if prediction.peak_memory_bytes is not None:
        yield "predicted_memory_gib", [prediction.peak_memory_bytes / 2**30]
    if times is None:
        return
    yield "measured_step_time_s", [one.step_us / 1e6 for one in times.measurements]
    yield "prediction_error_pct", [(prediction.iteration_us / one.step_us - 1) * 100 for one in times.measurements]
    if times.memory_bytes is not None:
        yield "measured_memory_gib", [times.memory_bytes / 2**30]
