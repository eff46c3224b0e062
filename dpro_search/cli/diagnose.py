"""`dpro-search diagnose`: what an iteration waits for on each rank, and the gain of removing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpro_search.cli.options import ClusterOption, JsonOption, MachineOption, SpeedsOption, use_machine
from dpro_search.cli.options.sample import SampleOption

if TYPE_CHECKING:
    from dpro_search.kinds import Table
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

    from dpro_search.analysis.efficiency import efficiency_of, split_options
    from dpro_search.cli.options.sample import folder_of
    from dpro_search.cli.printing import print_json, warn
    from dpro_search.kinds import job_of, load_source
    from dpro_search.kinds._answers import fields_of
    from dpro_search.kinds._job_on_cluster import job_on_cluster, repeated
    from dpro_search.space.scenario import Scenario

    use_machine(machine)
    recorded = job_of(load_source(folder_of(trace, sample)))
    given, changed = split_options(changes or ())
    job, _, place = job_on_cluster(recorded, cluster, changed, verb="diagnose")
    facts = job.diagnose() | ({} if place is None else {"cluster": fields_of(place.facts)})
    facts["recording_doubt"] = recorded.recording_doubt
    warn(facts["recording_doubt"])
    efficiency = efficiency_of(recorded, Scenario().on(cluster), given, facts["iteration_us"])
    facts |= fields_of(efficiency)
    asked = next((row["what_if"] for row in facts["gains"] if repeated(job, row["what_if"])), None)
    facts["command"] = None if asked is None else shlex.join([
        *("dpro-search", "replay", *(() if trace is None else (str(trace),)), *(() if sample is None else ("--sample", sample))),
        *(() if cluster is None else ("--cluster", cluster)),
        *(part for change in changes or () for part in ("--set", change)),
        *("--what-if", asked),
    ])  # fmt: skip
    if as_json:
        print_json(facts)
    else:
        print_diagnosis(facts, job.tables(facts), efficiency)


def print_diagnosis(facts: Mapping[str, Any], tables: Sequence[Table], efficiency: Efficiency | None = None) -> None:
    """The diagnosis of a job, for people."""
    from dpro_search.analysis.efficiency import sentences
    from dpro_search.cli.printing import print_table, say, stdout_console
    from dpro_search.quantities import time_text
    from dpro_search.replay.sentences import differs_from_median

    console = stdout_console()
    measured = facts["measured_iteration_us"]
    beside = "" if measured is None else f", measured {time_text(measured)}"
    console.print(f"An iteration takes {time_text(facts['iteration_us'])} (replayed{beside}).")
    mean_us = facts.get("predicted_mean_us")
    if mean_us is not None and differs_from_median(mean_us, facts["iteration_us"]):
        console.print(f"The mean is {time_text(mean_us)}, because some steps stall; this is the median.")
    if "cluster" in facts:
        say(console, f"On {facts['cluster']['name']}, {facts['cluster']['ranks']} ranks. Interval: {facts['cluster']['interval']}.")
        for sentence in facts["cluster"]["assumed"]:
            say(console, f"  assumed: {sentence}")
    for sentence in (*facts["findings"], *facts["warnings"]):
        say(console, f"* {sentence}")
    for sentence in sentences(efficiency):
        console.print(sentence, highlight=False)
    for table in tables:
        print_table(console, table.title, table.columns, table.rows)
    if facts.get("command") is not None:
        console.print("The first of these gains again, and any other by its name:")
        console.print(f"  {facts['command']}", soft_wrap=True, highlight=False)
