"""`dpro-search report`: one page on a search or a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpro_search.cli.options import JsonOption
from dpro_search.cli.options.sample import SampleOption


def report(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Folder of a search, or of a trace."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page to write.")] = Path("report.html"),
    sample: SampleOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="TRACE", help="Path of the search's trace, if it has moved.")
    ] = None,
    plans: Annotated[
        int | None,
        typer.Option(
            "--plans",
            metavar="N",
            min=1,
            help="Plans of a described job to show; if the search priced fewer, others are priced.",
            show_default="200",
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="TRACKER[:PLACE]",
            help="Also write plans, predictions, measurements and the page into mlflow:URI, wandb:PROJECT or tensorboard:DIR.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page: the gain of the best plans with its uncertainty, and the breakdown of an iteration.

    Example: dpro-search report runs/mine --out mine.html
    """
    from dpro_search.cli.options.sample import folder_of
    from dpro_search.cli.printing import print_json, say, stderr_console
    from dpro_search.collect._files import write_file
    from dpro_search.deploy.trackers import track
    from dpro_search.errors import InputError
    from dpro_search.kinds import described_in
    from dpro_search.report import render
    from dpro_search.report.gathered import LEAST_PLANS, facts_of_run, facts_of_source

    folder = folder_of(source, sample)
    if out.is_dir():
        raise InputError(f"--out {out}: is a folder; name a file, like {out / 'report.html'}")
    searched = (folder / "run.json").is_file()
    if not searched and folder.is_dir() and not (folder / "meta.json").is_file() and described_in(folder) is None:
        raise InputError(f"{folder}: neither a run folder (run.json) nor a trace folder (meta.json)")
    if to and not searched:
        raise InputError(f"--to {to[0]}: only of a run folder, and {folder} is none")
    if trace is not None and not searched:
        raise InputError(f"--trace {trace}: {folder} is a trace itself; leave the option out")
    with stderr_console().status("reading the trace") as status:
        if searched:
            facts = facts_of_run(folder, trace, status.update, least_plans=plans or LEAST_PLANS)
        else:
            facts = facts_of_source(folder, status.update)
        write_file(out, render(facts).encode())
        places = [track(folder, out, each) for each in to or ()]
    if as_json:
        print_json({"report": str(out)} | ({"tracked": places} if places else {}))
    else:
        for note in facts.notes:
            say(stderr_console(), f"note: {note}")
        print("\n".join([f"report: {out}", *(f"tracked: {place}" for place in places)]))
