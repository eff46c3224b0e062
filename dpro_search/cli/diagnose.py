"""`dpro-search diagnose`: what an iteration waits for on each rank, and the gain of removing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import ClusterOption, JsonOption, MachineOption, SpeedsOption, use_machine
from dpro_search.cli.options.sample import SampleOption

if TYPE_CHECKING:
    from dpro_search.kinds import Diagnosis
    from dpro_search.kinds._work import Efficiency


def diagnose(
    trace: Annotated[Path | None, typer.Argument(metavar="TRACE", help="Trace folder, profile or job.toml.")] = None,
    sample: SampleOption = None,
    cluster: ClusterOption = None,
    changes: SpeedsOption = None,
    machine: MachineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an iteration waits for, stragglers, the gain of each possible improvement, and memory use.

    Example: dpro-search diagnose T
    """
    import shlex

    import msgspec

    from dpro_search.analysis.diagnose import diagnose as diagnosed
    from dpro_search.cli.options.sample import folder_of
    from dpro_search.cli.printing import print_json, warn
    from dpro_search.kinds import job_of, load_source

    use_machine(machine)
    diagnosis, what_if, efficiency = diagnosed(job_of(load_source(folder_of(trace, sample))), cluster, changes or ())
    warn(diagnosis.recording_doubt or None)
    command = None if what_if is None else shlex.join([
        *("dpro-search", "replay", *(() if trace is None else (str(trace),)), *(() if sample is None else ("--sample", sample))),
        *(() if cluster is None else ("--cluster", cluster)),
        *(part for change in changes or () for part in ("--set", change)),
        *("--what-if", what_if),
    ])  # fmt: skip
    diagnosis = msgspec.structs.replace(diagnosis, command=command)
    if as_json:
        print_json(diagnosis)
    else:
        print_diagnosis(diagnosis, efficiency)


def print_diagnosis(diagnosis: Diagnosis, efficiency: Efficiency | None = None) -> None:
    """The diagnosis of a job, for people."""
    from msgspec import UNSET

    from dpro_search.analysis.efficiency import sentences
    from dpro_search.cli.printing import print_table, say, stdout_console
    from dpro_search.quantities import time_text
    from dpro_search.replay.sentences import differs_from_median

    console = stdout_console()
    measured = diagnosis.measured_iteration_us
    beside = "" if measured is None else f", measured {time_text(measured)}"
    console.print(f"An iteration takes {time_text(diagnosis.iteration_us)} (replayed{beside}).")
    mean_us = diagnosis.mean_us
    if mean_us is not None and differs_from_median(mean_us, diagnosis.iteration_us):
        console.print(f"The mean is {time_text(mean_us)}, because some steps stall; this is the median.")
    if diagnosis.cluster is not UNSET:
        cluster = diagnosis.cluster
        interval = f" Interval: {cluster.interval}." if cluster.interval else ""
        say(console, f"On {cluster.name}, {cluster.ranks} ranks.{interval}")
        for sentence in cluster.assumed:
            say(console, f"  assumed: {sentence}")
    for sentence in (*diagnosis.findings, *diagnosis.warnings):
        say(console, f"* {sentence}")
    for sentence in sentences(efficiency):
        console.print(sentence, highlight=False)
    for table in diagnosis.tables:
        print_table(console, table.title, table.columns, table.rows)
    if diagnosis.command:
        console.print("The first of these gains again, and any other by its name:")
        console.print(f"  {diagnosis.command}", soft_wrap=True, highlight=False)
