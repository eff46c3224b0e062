"""Export of a `Plan`: one folder with the files that a real job needs to follow it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpro_search.collect._files import written_folder
from dpro_search.deploy.losses import tolerance_of
from dpro_search.deploy.measure_scripts import BASELINE, PlanToMeasure, measure_files
from dpro_search.deploy.parts.part import FOLDER, HELPERS, JobFacts, Part, Servers, Target
from dpro_search.deploy.parts.tensorflow_step import step_files
from dpro_search.deploy.targets import more_servers, parts_of
from dpro_search.errors import InputError
from dpro_search.quantities import interval_text, time_text
from dpro_search.space.plan import Plan, Prediction

_START_SERVERS = {
    True: "Start server N on the host of worker N, cyclically.",
    False: "Start each server on a host of its own.",
}
_MEASURE = (
    "To measure the plan beside the baseline, fill in `measure_torchrun.sh` and start it, or `sbatch measure_slurm.sh`. It ends "
    "with the commands that give the times to dpro-search."
)


@dataclass(frozen=True, kw_only=True)
class ExportedFiles:
    """The written files, and how a job uses them."""

    folder: Path
    files: tuple[str, ...]  # names in `folder`, sorted
    usage: str  # a few lines for people
    env: Mapping[str, str]  # what the ``*.env`` files set
    number: int | None = None  # of a run's plan

    @property
    def helpers(self) -> tuple[str, ...]:
        """Files that a training script must use to follow the plan."""
        return tuple(name for name in self.files if name in HELPERS)


def export_plan(
    plan: Plan,
    out: Path,
    targets: Sequence[Target],
    facts: JobFacts | None = None,
    expected: tuple[Prediction, Prediction] | None = None,
    known: Sequence[Target] = (),
    about: Sequence[str] = (),
    measured: PlanToMeasure | None = None,
) -> ExportedFiles:
    """Write the folder `out`, whole or not at all: ``plan.json``, ``README.md``, and what each target needs.

    Variables are in ``<target>.env`` (lines KEY=VALUE, quoted for a shell); helpers are Python files that the script imports.

    Parameters
    ----------
    targets
        Targets that follow the plan; see `targets.targets_for`.
    facts
        Facts of the job, for further checks.
    expected
        Predictions of the plan and of the recorded setting, for the README.
    known
        All targets that there are, for the error about a field that none of `targets` can express.
    about
        Further sentences for people.
    measured
        The plan in its run folder: scripts are written that measure it beside the baseline, if the targets say how ranks start.

    Raises
    ------
    InputError
        `out` exists or cannot be named in a command, or the plan has a field that the targets cannot express.
    MissingCapabilityError
        The disk cannot take it.
    """
    if not os.path.realpath(out).isprintable():
        raise InputError(f"--out {out}: a name with a line break or another control character; choose another")
    parts = {target: _in_folder(part, out) for target, part in parts_of(plan, targets, facts, known).items()}
    if os.pathsep in os.path.realpath(out) and any(part.changes_script or part.on_path for part in parts.values()):
        raise InputError(f"--out {out}: PYTHONPATH cannot name a folder with '{os.pathsep}'; choose another")
    contents = _files(parts)
    if measured is not None and any(part.short_run is not None for part in parts.values()):
        try:
            today: Mapping[Target, Part] | InputError = {
                target: _in_folder(part, out / BASELINE) for target, part in parts_of(Plan(), targets, facts, known).items()
            }
        except InputError as refusal:
            today = refusal
        scripts = measure_files(measured, parts, today, expected)
        if scripts and not isinstance(today, InputError):
            contents |= {f"{BASELINE}/{name}": content for name, content in _files(today).items()}
        contents |= scripts
        about = (*about, *([_MEASURE] if scripts else []))
    contents |= {"plan.json": plan.to_json(), "README.md": _readme(plan, parts, facts, expected, about).encode()}
    with written_folder(out) as folder:
        for name, content in contents.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    env = {key: value for part in parts.values() for key, value in part.env.items()}
    usage = [*_usage(parts, str(out)), *_needs(plan, facts), *about]
    return ExportedFiles(folder=out, files=tuple(sorted(contents)), usage="\n".join(usage), env=env)


def _files(parts: Mapping[Target, Part]) -> dict[str, bytes]:
    """The files of all targets by their names."""
    contents = {f"{target}.env": _lines(part.env) for target, part in parts.items() if part.env or target.always_env}
    step: dict[str, object] = {}
    for part in parts.values():
        contents |= part.files
        step |= part.step
    return contents | step_files(step) if step else contents


def _in_folder(part: Part, folder: Path) -> Part:
    """A part with the path of the folder in its variables."""
    return replace(part, env={key: value.replace(FOLDER, os.path.realpath(folder)) for key, value in part.env.items()})


def _lines(env: Mapping[str, str]) -> bytes:
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in env.items()).encode()


def _usage(parts: Mapping[Target, Part], folder: str) -> list[str]:
    """How to start the job, and what changes in its script."""
    first = next((target for target in parts if target.communicates), next(iter(parts), None))
    started = "python train.py" if first is None else parts[first].start or first.start
    files = [f"{folder}/{target}.env" for target, part in parts.items() if part.env or target.always_env]
    read = " && ".join(f". {shlex.quote(name)}" for name in files)
    command = f"(set -a && {read} && {started})" if files else started
    script = list(dict.fromkeys(line for part in parts.values() for line in part.script))
    setup = dict.fromkeys(line for part in parts.values() for line in part.setup)
    uses_files = any(part.changes_script or part.on_path for part in parts.values())
    everywhere = " (scheduler and servers too)" if files and any(target.servers for target in parts) else ""
    path = f", with `{folder}` on PYTHONPATH" if uses_files else ""
    return [
        f"Start the job with `{command}`{everywhere}{path}.",
        *(script or ["The training script stays as it is."]),
        *setup,
    ]


def _readme(
    plan: Plan,
    parts: Mapping[Target, Part],
    facts: JobFacts | None,
    expected: tuple[Prediction, Prediction] | None,
    about: Sequence[str],
) -> str:
    items = [*_usage(parts, "."), *_needs(plan, facts), *_expectations(plan, facts, expected), *about]
    lines = [f"{number}. {line}" for number, line in enumerate(items, start=1)]
    return "\n".join(["# A plan for a training job, exported by dpro-search", "", *lines, ""])


def _needs(plan: Plan, facts: JobFacts | None) -> list[str]:
    """Text that says where to start servers, and which additional hosts they need."""
    needs = [] if plan.servers_on_workers is None else [_START_SERVERS[plan.servers_on_workers]]
    recorded = Servers() if facts is None else facts.servers
    more = more_servers(plan, recorded)
    if not more:
        return needs
    hosts = "1 more host" if more == 1 else f"{more} more hosts"
    needed = f"it needs {hosts}, with links like the others'."
    if recorded.on_workers:
        return [*needs, f"The plan has servers on hosts of their own where the recorded ones were on the workers': {needed}"]
    return [*needs, f"The plan has {plan.servers} servers where {recorded.count} were recorded: {needed}"]


def _expectations(plan: Plan, facts: JobFacts | None, expected: tuple[Prediction, Prediction] | None) -> list[str]:
    sentences = []
    if expected is not None:
        planned, recorded = expected
        low, high = planned.interval_us
        sentences.append(
            f"Expect {time_text(planned.iteration_us)} an iteration ({interval_text(low, high)}, nine times in ten) "
            f"in place of {time_text(recorded.iteration_us)}: {recorded.iteration_us / planned.iteration_us:.2f}x."
        )
    workload = None if facts is None else facts.workload
    promise = tolerance_of(plan, None if workload is None else workload(plan).precision).promise
    return [*sentences, f"The plan should not change what is learned: {promise}. `plan.json` is the plan itself."]
