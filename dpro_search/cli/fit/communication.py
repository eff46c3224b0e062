"""The part of `dpro-search fit` on communication: measures all-reduces on shaped hosts, and trains on them or on recorded jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.model_file import CommunicationModel, SeriesInfo
    from dpro_search.costmodel.collectives.series import Series
    from dpro_search.measure.all_reduces import CommProgress, CommRequest


def are_of_communication(sources: Sequence[Path]) -> bool:
    """Whether sources are traces, published tables or measured all-reduces, and not tables of clusters.

    Raises `InputError` where they are of both kinds, or a file cannot be read.
    """
    from dpro_search.collect.tables.all_reduces import is_comm_table
    from dpro_search.errors import InputError

    kinds = {source: source.is_dir() or is_comm_table(source) for source in sources}
    if len(set(kinds.values())) > 1:
        clusters = next(source for source, communication in kinds.items() if not communication)
        raise InputError(f"{clusters}: no trace and no table of all-reduces, unlike the others; train on it separately")
    return any(kinds.values())


def train_communication(sources: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Train the model of communication on traces and tables, and print its scores.

    Raises `JobError` for series with a large error, which are not in the model.
    """
    from dpro_search.cli.printing import print_json, stderr_console
    from dpro_search.collect._files import require_new
    from dpro_search.costmodel.collectives.model_file import CommunicationModel
    from dpro_search.errors import JobError

    require_new(out)
    series = [one for source in sources for one in _series(source)]
    with stderr_console().status("training"):
        model = CommunicationModel.train(series, [source.name for source in sources])
    useful = model.useful()
    written = out if useful.info.series else None
    if written is not None:
        useful.save(written)
    folder = _write_choices(sources, out) if written is not None else None
    if as_json:
        facts = {"model": written and str(written), "models": [_facts(one) for one in model.info.series]}
        print_json(facts | ({"all_reduces": str(folder)} if folder is not None else {}))
    else:
        _print_scores(model, written)
        if folder is not None:
            print(f"all-reduces by size, for training scripts: {folder}")
    refusals = [one.refusal for one in model.info.series if one.refusal is not None]
    if refusals:
        raise JobError(f"{'left out of the model' if written else 'no model was written'}: {'; '.join(refusals)}")


def request_of(backends: str | None, ranks: str, rates: str, **others: Any) -> CommRequest:
    """The request of the options of --collect comm; `others` are passed on. Raises `InputError` for invalid values."""
    from dpro_search.errors import InputError
    from dpro_search.measure.all_reduces import CommRequest
    from dpro_search.quantities import parse_rate_bps

    counts = ranks.split(",")
    if not all(text.strip().isascii() and text.strip().isdigit() for text in counts):
        raise InputError(f"--ranks {ranks}: write numbers, like 2,4,8")
    return CommRequest(
        backends=tuple(name.strip() for name in backends.split(",")) if backends else (),
        ranks=tuple(dict.fromkeys(int(text) for text in counts)),
        rates_bps=tuple(dict.fromkeys(parse_rate_bps(text.strip()) for text in rates.split(","))),
        **others,
    )


def measure_communication(request: CommRequest, out: Path, as_json: bool) -> None:
    """Measure all-reduces into the table `out`; continues where an earlier call stopped."""
    from dpro_search.cli.printing import print_json, stderr_console
    from dpro_search.measure.all_reduces import collect_communication

    with stderr_console().status("starting") as status:

        def show(progress: CommProgress) -> None:
            status.update(f"{progress.rows} all-reduces in the table, {progress.new} calls timed ({progress.now})")

        progress = collect_communication(request, out, show)
    facts = {
        "table": str(out),
        "models": [],
        "rows": progress.rows,
        "calls": progress.new,
        "complete": progress.complete,
        "skipped": progress.skipped,
        "failed": progress.failed_jobs,
    }
    if as_json:
        print_json(facts)
        return
    for name, reason in (*progress.skipped.items(), *progress.failed_jobs.items()):
        stderr_console().print(f"warning: {name}: {reason}", style="yellow")
    rest = "" if progress.complete else "; not complete: the same command continues"
    print(f"{progress.rows} all-reduces, {progress.new} calls timed now{rest}")
    print(f"table: {out}")


def _write_choices(sources: Sequence[Path], out: Path) -> Path | None:
    """Write the library of all-reduces with the choices from its tables, each a session; None: no table has any."""
    from dpro_search.collect.tables.all_reduces import read_comm_table
    from dpro_search.costmodel.collectives.all_reduce_table import choices
    from dpro_search.deploy.all_reduce import write_all_reduces

    tables = choices([read_comm_table(source) for source in sources if not source.is_dir()])
    if not tables:
        return None
    write_all_reduces(out / "all_reduces", tables)
    return out / "all_reduces"


def _series(source: Path) -> list[Series]:
    from dpro_search.cli.printing import stderr_console
    from dpro_search.collect.tables.all_reduces import read_comm_table
    from dpro_search.collect.trace import Trace
    from dpro_search.costmodel.collectives.series import nccl_series, table_series, trace_series
    from dpro_search.errors import InputError

    if not source.is_dir():
        table = read_comm_table(source)
        for reason, count in table.dropped.items():
            stderr_console().print(f"warning: {source}: {count} lines left out: {reason}", style="yellow")
        return table_series(table)
    if not (source / "meta.json").exists():
        return nccl_series(source)
    trace = Trace.load(source)
    try:
        return [trace_series(trace)]
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _facts(series: SeriesInfo) -> dict[str, Any]:
    return {
        "name": series.name,
        "rows": series.rows,
        "mape_pct": series.mape_pct,
        "coverage": series.coverage,
        "formula_mape_pct": series.formula_mape_pct,
        "spread_pct": series.spread_pct,
        "useful": series.refusal is None,
        "sizes": series.sizes,
        "cost": series.cost,
    }


def _print_scores(model: CommunicationModel, out: Path | None) -> None:
    from rich.table import Table

    from dpro_search.cli.printing import percent, stdout_console

    def share(value: float | None) -> str:
        return "-" if value is None else percent(value)

    table = Table(title="Duration of all-reduces, each size predicted from the others", box=None, title_justify="left")
    for name in ("measured", "rows", "sizes", "formula", "its error", "error", "in 90 % int.", "repeats"):
        table.add_column(name, justify="left" if name in ("measured", "formula") else "right")
    for one in model.info.series:
        table.add_row(
            one.name,
            str(one.rows),
            str(one.sizes),
            one.cost.algorithm.value,
            share(one.formula_mape_pct),
            share(one.mape_pct),
            share(None if one.coverage is None else one.coverage * 100),
            share(one.spread_pct),
        )
    stdout_console().print(table)
    if out is not None:
        print(f"model: {out}")
