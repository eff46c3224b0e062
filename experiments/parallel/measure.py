"""`measure`: records times and runs every case, a round after the other; what was measured is not measured again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.collect.tables.parallel_times import ParallelTimes
from dpro_search.deploy.jobs import JobRun
from dpro_search.deploy.step_split import StepSplit
from dpro_search.errors import DproSearchError
from dpro_search.kinds import JobInScenario, described_job, job_of, load_source, timed_job
from dpro_search.kinds._kind import Description
from dpro_search.parallel.job import ParallelJob
from dpro_search.parallel.prepared import PreparedJob
from dpro_search.space.plan import Plan
from experiments.parallel.cases import SLOWER, Case

WARMUP, STEPS, PACED_STEPS = 3, 11, 8
TRAIN = Path(__file__).with_name("train.py")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    job: str
    strategy: str
    round: int
    iteration_us: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    split: StepSplit | None = None  # Of paced runs: where the time of a step went.
    failed: str = ""


def rows_of(out: Path) -> list[Row]:
    """All runs of a folder; a line that was not finished is left out."""
    path = out / "runs.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Row))
        except msgspec.DecodeError:
            continue
    return found


def measure(out: Path, chosen: Sequence[Case], python: str, rounds: int, say: Callable[[str], None]) -> None:
    """Time blocks and exchanges of the jobs, then run each case once a round; adds to ``runs.jsonl``."""
    out.mkdir(parents=True, exist_ok=True)
    for case in chosen:
        path = case.write(out, cores_of())
        timed_job(
            path,
            [case.settings],
            command_of(path, python, STEPS),
            out / case.recorded,
            on_start=lambda what: say(f"timing {what}"),
        )
        if case.paced:
            slower(ParallelTimes.load(out / case.recorded), SLOWER).save(out / case.times)
    done = {(row.job, row.strategy, row.round) for row in rows_of(out)}
    left = [(number, case) for number in range(rounds) for case in chosen if (case.job, case.strategy, number) not in done]
    began = time.monotonic()
    for place, (number, case) in enumerate(left):
        path = case.write(out, cores_of())
        row = run_case(case, path, command_of(path, python, PACED_STEPS if case.paced else STEPS), number)
        save_row(out, row)
        rest_s = (time.monotonic() - began) / (place + 1) * (len(left) - place - 1)
        typical = f"{sorted(row.iteration_us)[len(row.iteration_us) // 2] / 1e3:.0f} ms" if row.iteration_us else row.failed
        say(f"round {number} {case.job} {case.strategy}: {typical} ({place + 1} of {len(left)}, {rest_s / 60:.0f} min left)")


def slower(times: ParallelTimes, factor: float) -> ParallelTimes:
    """The same of a device that takes `factor` times as long for everything but exchanges."""
    blocks = [
        msgspec.structs.replace(
            row, forward_us=row.forward_us * factor, backward_us=row.backward_us * factor, reduce_us=row.reduce_us * factor
        )
        for row in times.blocks
    ]
    updates = [msgspec.structs.replace(row, us=row.us * factor) for row in times.updates]
    return msgspec.structs.replace(
        times,
        blocks=tuple(blocks),
        updates=tuple(updates),
        flops_per_s=times.flops_per_s / factor,
        memory_bytes_per_s=times.memory_bytes_per_s / factor,
        split_forward_us=times.split_forward_us * factor,
        split_backward_us=times.split_backward_us * factor,
    )


def predicted(case: Case, out: Path, times: Any = None) -> Any:
    """The prediction of a case; `times` in place of all that its job's file has."""
    job = job_with(case, out, times)
    return job.replayed(plan_of(case, job))


def job_with(case: Case, out: Path, times: Any = None) -> JobInScenario:
    """The job of a case, with some recorded times in place of all that its file has."""
    source: Any = load_source(out / case.job / "job.toml")
    return job_of(source if times is None else replace(source, times=times))


def prepared(here: JobInScenario) -> PreparedJob:
    """What a described job prepares for all its plans."""
    assert isinstance(here.job, ParallelJob)
    return here.job.prepared(here.scenario)


def plan_of(case: Case, here: JobInScenario) -> Plan:
    """The plan of a case's settings."""
    return here.job.scenario([case.settings]).plan


def save_row(out: Path, row: Row) -> None:
    """Add a run to those of a folder."""
    with (out / "runs.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def run_case(case: Case, path: Path, command: Sequence[str], number: int, *, name: str = "", plan: Plan | None = None) -> Row:
    """One run of a case, or of its job under another plan of some name."""
    source = load_source(path)
    assert isinstance(source, Description)
    job = job_of(source)
    try:
        run: JobRun = described_job(source, job, path.parent, command, paced=case.paced).run(
            plan_of(case, job) if plan is None else plan, warmup=WARMUP, timeout_s=600
        )
    except DproSearchError as error:
        return Row(job=case.job, strategy=name or case.strategy, round=number, failed=str(error)[:400])
    losses = tuple(loss.value for loss in run.losses)
    return Row(
        job=case.job,
        strategy=name or case.strategy,
        round=number,
        iteration_us=tuple(run.times.iteration_us.tolist()),
        losses=losses,
        split=None if run.split is None else run.split.measured,
    )


def command_of(path: Path, python: str, steps: int) -> list[str]:
    """The command of a rank."""
    return [python, "-W", "ignore", str(TRAIN), str(path.parent.resolve() / "config.json"), str(steps)]


def cores_of() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def tell(text: str) -> None:
    """On the terminal, at once."""
    print(text, file=sys.stderr, flush=True)
