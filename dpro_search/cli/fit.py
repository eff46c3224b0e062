"""`dpro-search fit`: trains cost models, and measures what they are trained on."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpro_search.costmodel.learned.model_file import FusionModel


class Measurement(StrEnum):
    """What can be measured for training."""

    XLA = "xla"


def fit(
    sources: Annotated[
        list[Path] | None, typer.Argument(metavar="[TABLE]...", help="Tables of measured clusters (default: the bundled one).")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="PATH", help="Model folder to write; with --collect, the table.")] = ...,  # type: ignore[assignment]
    collect: Annotated[Measurement | None, typer.Option("--collect", help="Measure instead of training.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="With --collect: clusters in the table, in all.")] = 3000,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="With --collect: only these of the workloads' models.")
    ] = None,
    workloads: Annotated[
        Path, typer.Option("--workloads", metavar="FILE", help="With --collect: Python file with BUILDERS of models.")
    ] = Path("experiments/costmodel/models.py"),
    python: Annotated[
        str | None, typer.Option("--python", metavar="PYTHON", help="With --collect: interpreter that has TensorFlow.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a cost model on measured clusters of ops, or measure them.

    A collection may be interrupted: the same command goes on where it stopped.

    Example: dpro-search fit --collect xla --limit 3000 --out clusters.jsonl; dpro-search fit clusters.jsonl --out model
    """
    from dpro_search.errors import InputError

    if collect is not None:
        if sources:
            raise InputError("--collect measures and takes no TABLE; train on its table with another 'dpro-search fit'")
        _collect(out, limit, models, workloads, python, as_json)
    else:
        _train(tuple(sources or ()), out, as_json)


def _train(sources: tuple[Path, ...], out: Path, as_json: bool) -> None:
    from dpro_search.cli._output import print_json, stderr_console
    from dpro_search.collect.clusters.bundled import bundled_table_path
    from dpro_search.collect.clusters.table import read_table
    from dpro_search.costmodel.learned.model_file import FusionModel
    from dpro_search.errors import InputError

    for source in sources:
        if source.is_dir():
            raise InputError(f"{source}: a folder; name a table made by 'dpro-search fit --collect xla'")
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    tables = [read_table(source) for source in sources or (bundled_table_path(),)]
    for table, source in zip(tables, sources, strict=False):
        for reason, count in table.dropped.items():
            stderr_console().print(f"warning: {source}: {count} lines left out: {reason}", style="yellow")
    with stderr_console().status("training"):
        model = FusionModel.train(tables)
    model.save(out)
    if as_json:
        print_json({"model": str(out), "models": [_facts(model)]})
    else:
        _print_scores(model, out)


def _facts(model: FusionModel) -> dict[str, Any]:
    overall = model.info.overall
    return {
        "name": model.info.name,
        "rows": model.info.rows,
        "mape_pct": overall.mape_pct,
        "coverage": overall.coverage,
        "pays_right_pct": overall.pays_right_pct,
        "scores": model.info.scores,
    }


def _print_scores(model: FusionModel, out: Path) -> None:
    from rich.table import Table

    from dpro_search.cli._output import percent, stdout_console

    def share(value: float | None) -> str:
        return "-" if value is None else percent(value)

    table = Table(title="Duration of fused clusters, each model predicted from the others", box=None, title_justify="left")
    for name in ("left out", "rows", "error", "sum", "0.8 sum", "in 90 % int.", "pays: right", "by sum"):
        table.add_column(name, justify="left" if name == "left out" else "right")
    for score in model.info.scores:
        table.add_row(
            score.model,
            str(score.rows),
            percent(score.mape_pct),
            percent(score.sum_mape_pct),
            percent(score.scaled_sum_mape_pct),
            share(None if score.coverage is None else score.coverage * 100),
            share(score.pays_right_pct),
            share(score.sum_pays_right_pct),
        )
    stdout_console().print(table)
    print(f"{model.info.rows} clusters measured on {model.info.sources[0].machine}")
    print(f"model: {out}")


def _collect(out: Path, limit: int, models: str | None, workloads: Path, python: str | None, as_json: bool) -> None:
    import os

    from dpro_search.cli._output import print_json, stderr_console
    from dpro_search.collect.clusters.collector import CollectRequest, Progress, collect_clusters
    from dpro_search.errors import MissingCapabilityError

    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    interpreter = Path(python) if python else root / "tensorflow" / "bin" / "python"
    if not interpreter.is_file():
        raise MissingCapabilityError(
            f"{interpreter}: no such interpreter; build TensorFlow's with 'scripts/make_env.sh tensorflow' or name one by --python"
        )
    request = CollectRequest(
        python=str(interpreter), workloads=workloads, models=tuple(models.split(",")) if models else (), limit=limit
    )
    with stderr_console().status("starting") as status:

        def show(progress: Progress) -> None:
            left = (progress.limit - progress.measured) / max(progress.per_minute, 1e-9)
            failed = f", {progress.failed.total()} failed" if progress.failed else ""
            status.update(
                f"{progress.measured} of {progress.limit} clusters{failed}, "
                f"{progress.per_minute:.0f} a minute, about {left:.0f} minutes left ({progress.model})"
            )

        progress = collect_clusters(request, out, show)
    facts = {
        "table": str(out),
        "models": [],
        "rows": progress.measured,
        "new": progress.new,
        "failed": dict(progress.failed),
        "per_minute": progress.per_minute,
    }
    if as_json:
        print_json(facts)
        return
    print(f"{progress.measured} clusters, {progress.new} of them new, {progress.per_minute:.0f} a minute")
    for reason, count in progress.failed.most_common():
        print(f"{count} without times: {reason}")
    print(f"table: {out}")
