"""Compiled programs on processors beside real runs: python -m experiments.xla.processors {compile,run,table} OUT

The three steps of `small_steps.py` on 2, 4 and 8 processes, behind links of two rates, with meshes along data, fsdp and tp and a
mixed one. `compile` keeps their programs in the folder OUT. `run` runs each mesh twice, all meshes of a job before any the second
time, and goes on where it was ended; nothing else should compute meanwhile. `table` compares.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.cluster import parse_cluster
from dpro_search.collect.launch.ranks import environment_python
from dpro_search.errors import DproSearchError
from dpro_search.kinds.xla.capture import ProgramRequest, capture_program
from dpro_search.kinds.xla.job import OTHER_MESH_ERROR, RAN_ERROR, XlaJob
from dpro_search.kinds.xla.plans import pairs_text
from dpro_search.kinds.xla.program import read_program
from dpro_search.kinds.xla.times import ProgramTimes, read_times, timed
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario

SCRIPT = Path(__file__).with_name("small_steps.py")
STEPS = ("perceptron", "transformer", "convolutions")
RANKS, LINKS = (2, 4, 8), ("500mbit", "2gbit")
AXES = ("data", "fsdp", "tp")
MIXED = {4: (2, 1, 2), 8: (2, 2, 2)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step on some processes behind links of one rate."""

    step: str
    ranks: int
    link: str
    out: Path

    @property
    def cluster(self) -> str:
        return f"{self.ranks}xtestbed@{self.link}"

    @property
    def meshes(self) -> dict[str, dict[str, int]]:
        """The meshes that run, by name."""
        sizes = {axis: tuple(self.ranks if each == axis else 1 for each in AXES) for axis in AXES}
        if self.ranks in MIXED:
            sizes["mixed"] = MIXED[self.ranks]
        return {name: dict(zip(AXES, each, strict=True)) for name, each in sizes.items()}

    def program(self, name: str) -> Path:
        """Folder of the program of a mesh."""
        return self.out / f"{self.step}-{self.cluster}-{name}"

    def times(self, name: str, number: int) -> Path:
        """File with the times of a run of a mesh."""
        return self.out / f"{self.step}-{self.cluster}-{name}-{number}.json"

    def read(self, name: str, number: int) -> ProgramTimes:
        times = read_times(self.times(name, number))
        assert times is not None, f"{self.times(name, number)}: 'run' writes it"
        return times


def cases(out: Path) -> Iterator[Case]:
    for step, ranks, link in itertools.product(STEPS, RANKS, LINKS):
        yield Case(step=step, ranks=ranks, link=link, out=out)


def compile_all(out: Path) -> None:
    """Compile the programs that are not there."""
    python = str(environment_python("jax"))
    for case in cases(out):
        for name, mesh in case.meshes.items():
            if not case.program(name).exists():
                request = ProgramRequest(script=SCRIPT, function=case.step, on=case.cluster, mesh=mesh, python=python)
                capture_program(request, case.program(name))
                print(case.program(name).name, flush=True)


def run_all(out: Path) -> None:
    """Run what has not run. Collectives are timed once for each number of processes and rate, with the first step's first mesh."""
    python = str(environment_python("jax"))
    for case in cases(out):
        for number, (name, mesh) in itertools.product((0, 1), case.meshes.items()):
            path = case.times(name, number)
            if path.exists():
                continue
            with_exchanges = number == 0 and name == "data" and case.step == STEPS[0]
            try:
                times = timed(SCRIPT, case.step, mesh, {}, parse_cluster(case.cluster), python, with_exchanges=with_exchanges)
            except DproSearchError as error:
                print(f"{path.name}: {error}", flush=True)
                continue
            path.write_bytes(msgspec.json.encode(times))
            print(f"{path.name}: {times.iteration_us / 1e3:.1f} ms", flush=True)


def predicted_us(case: Case, ran: str) -> dict[str, float]:
    """The step with each mesh, predicted from the first run of one of them."""
    exchanges = replace(case, step=STEPS[0]).read("data", 0).exchanges
    program = read_program(case.program(ran))
    assert program is not None, "compiled"
    times = msgspec.structs.replace(case.read(ran, 0), exchanges=exchanges)
    job = XlaJob(replace(program, times=times))
    steps = {}
    for name, mesh in case.meshes.items():
        plan = Plan() if name == ran else Plan.of(mesh=pairs_text(mesh))
        steps[name] = job.lower(Scenario(plan=plan)).replayable.iterations().iteration_us
    return steps


def table(out: Path) -> Iterator[str]:
    """Errors, in lines."""
    ran, other, noise, regret = [], [], [], []
    by_case: dict[str, list[float]] = {}
    for case in cases(out):
        measured = {name: [case.read(name, number).iteration_us for number in (0, 1)] for name in case.meshes}
        means = {name: float(np.mean(us)) for name, us in measured.items()}
        noise += [abs(first / second - 1) for first, second in measured.values()]
        for base in case.meshes:
            predicted = predicted_us(case, base)
            for name, us in predicted.items():
                if name == base:
                    ran.append(us / measured[name][1] - 1)
                else:
                    error = us / means[name] - 1
                    other.append(error)
                    for key in (case.step, f"{case.ranks} processes", case.link, f"from {base}", f"to {name}"):
                        by_case.setdefault(key, []).append(error)
            best = min(predicted, key=predicted.__getitem__)
            regret.append(means[best] / min(means.values()) - 1)
        yield f"{case.step} {case.cluster}: " + ", ".join(f"{name} {us / 1e3:.1f} ms" for name, us in means.items())
    for title, errors in {"two runs of one mesh": noise, "as captured": ran, "another mesh": other, **by_case}.items():
        sizes = np.abs(errors)
        yield (
            f"{title:22} {len(sizes):4} predictions: median {100 * np.median(sizes):5.1f} %, mean {100 * sizes.mean():5.1f} %, "
            f"largest {100 * sizes.max():5.1f} %, mean with sign {100 * np.mean(errors):+5.1f} %"
        )
    for title, errors, interval in (("as captured", ran, RAN_ERROR), ("another mesh", other, OTHER_MESH_ERROR)):
        holds = np.mean([abs(1 / (1 + error) - 1) <= interval for error in errors])
        yield f"intervals of {100 * interval:.0f} %, {title}: hold {100 * holds:.0f} %"
    yield f"best mesh found in {sum(each == 0 for each in regret)} of {len(regret)}; mean loss {100 * np.mean(regret):.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "run", "table"))
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DPRO_SEARCH_PROGRAMS", str(arguments.out / "programs"))
    if arguments.what == "compile":
        compile_all(arguments.out)
    elif arguments.what == "run":
        run_all(arguments.out)
    else:
        print("\n".join(table(arguments.out)))


if __name__ == "__main__":
    main()
