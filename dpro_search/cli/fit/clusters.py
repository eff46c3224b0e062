"""The part of `dpro-search fit` on clusters of ops: measures them under XLA, and trains the model of fused ops."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.costmodel.fused.model_file import FusionModel


def train_clusters(sources: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Train the model of fused ops on tables of measured clusters (none: the bundled one) and print its scores."""
    from dpro_search.cli.printing import print_json, stderr_console
    from dpro_search.collect._files import require_new
    from dpro_search.collect.tables.clusters import bundled_table_path, read_table
    from dpro_search.costmodel.fused.model_file import FusionModel
    from dpro_search.errors import InputError, JobError

    for source in sources:
        if source.is_dir():
            raise InputError(f"{source}: a folder; name a table made by 'dpro-search fit --collect xla'")
    require_new(out)
    tables = [read_table(source) for source in sources or (bundled_table_path(),)]
    for table, source in zip(tables, sources, strict=False):
        for reason, count in table.dropped.items():
            stderr_console().print(f"warning: {source}: {count} lines left out: {reason}", style="yellow")
    with stderr_console().status("training"):
        model = FusionModel.train(tables)
    if (refusal := model.info.refusal) is not None:
        raise JobError(f"no model was written: {refusal}")
    model.save(out)
    if as_json:
        print_json({"model": str(out), "models": [_facts(model)]})
    else:
        _print_scores(model, out)


def _facts(model: FusionModel) -> dict[str, Any]:
    overall, blind = model.info.overall, model.info.times.overall
    return {
        "name": model.info.name,
        "rows": model.info.rows,
        "mape_pct": overall.mape_pct,
        "coverage": overall.coverage,
        "pays_right_pct": overall.pays_right_pct,
        "without_shapes": {"mape_pct": blind.mape_pct, "coverage": blind.coverage, "pays_right_pct": blind.pays_right_pct},
        "scores": model.info.scores,
    }


def _print_scores(model: FusionModel, out: Path) -> None:
    from rich.table import Table

    from dpro_search.cli.printing import percent, stdout_console

    def share(value: float | None) -> str:
        return "-" if value is None else percent(value)

    title = "Duration of fused clusters, each model predicted from the others"
    table = Table(title=title, box=None, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("left out", "rows", "error", "sum", "0.8 sum", "in 90 %", "pays", "by sum", "never"):
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
            share(score.never_pays_right_pct),
        )
    stdout_console().print(table)
    print(
        "in 90 %: measured in the 90 % interval; pays: right decisions to fuse, by the model, the sum of the members, and 'never'"
    )
    blind = model.info.times.overall
    inside = share(None if blind.coverage is None else blind.coverage * 100)
    print(f"without shapes: error {percent(blind.mape_pct)}, in its interval {inside}, pays: right {share(blind.pays_right_pct)}")
    print(f"{model.info.rows} clusters measured on {model.info.sources[0].machine}")
    print(f"model: {out}")


def measure_clusters(out: Path, limit: int, models: str | None, workloads: Path, python: str | None, as_json: bool) -> None:
    """Measure clusters until the table `out` holds `limit` of them; continues where an earlier call stopped."""
    from dpro_search.cli.printing import print_json, stderr_console
    from dpro_search.collect.launch.ranks import environment_python
    from dpro_search.errors import MissingCapabilityError
    from dpro_search.measure.clusters import ClusterProgress, CollectRequest, collect_clusters

    interpreter = Path(python) if python else environment_python("tensorflow")
    if not interpreter.is_file():
        raise MissingCapabilityError(
            f"{interpreter}: no such interpreter; build TensorFlow's with 'scripts/make_env.sh tensorflow' or name one by --python"
        )
    request = CollectRequest(
        python=str(interpreter), workloads=workloads, models=tuple(models.split(",")) if models else (), limit=limit
    )
    with stderr_console().status("starting") as status:

        def show(progress: ClusterProgress) -> None:
            left = (progress.limit - progress.rows) / max(progress.per_minute, 1e-9)
            failed = f", {progress.failed.total()} failed" if progress.failed else ""
            status.update(
                f"{progress.rows} of {progress.limit} clusters{failed}, "
                f"{progress.per_minute:.0f} a minute, about {left:.0f} minutes left ({progress.now})"
            )

        progress = collect_clusters(request, out, show)
    facts = {
        "table": str(out),
        "models": [],
        "rows": progress.rows,
        "new": progress.new,
        "failed": dict(progress.failed),
        "per_minute": progress.per_minute,
        "spent_s": {what: round(seconds, 1) for what, seconds in progress.spent_s.items()},
    }
    if as_json:
        print_json(facts)
        return
    print(f"{progress.rows} clusters, {progress.new} of them new, {progress.per_minute:.0f} a minute")
    print("seconds: " + ", ".join(f"{what} {seconds:.0f}" for what, seconds in progress.spent_s.items()))
    for reason, count in progress.failed.most_common():
        print(f"{count} without times: {reason}")
    print(f"table: {out}")
