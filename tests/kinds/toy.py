"""A kind of job in one file: a single rank that computes, then waits for a store in rounds; its plans say how many rounds.

Its trace has steps and two ops a step, and nothing that any other kind needs. Real jobs of this kind are a loop that sleeps, which
`ToyLauncher` starts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from dpro_search.collect.assemble.common import RankFile, RawJobFile, read_job
from dpro_search.collect.launchers import LaunchedJob, Launcher
from dpro_search.collect.trace import (
    ClockReport,
    EventKind,
    Events,
    Floats,
    Steps,
    TensorInfo,
    Trace,
    TraceMeta,
)
from dpro_search.deploy.parts.part import JobFacts as DeployedFacts
from dpro_search.deploy.parts.part import Part, Target
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds import Diagnosis, Job, JobInScenario, Kind, PlanOptions
from dpro_search.kinds._diagnosis import PredictedGain, RankFacts, critical_ops
from dpro_search.kinds._options import refuse_compute
from dpro_search.replay import Timeline, replay
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.path.segments import path_totals
from dpro_search.replay.replayer import settled_us
from dpro_search.replay.sensitivity import graph_change
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph
from dpro_search.space.scenario import Scenario
from dpro_search.space.schemes import SchemeSettings, counted
from dpro_search.space.transformations import RECORDED, Choice, Knob, PlanningFacts, PlanSpace
from dpro_search.space.transformations._base import grid

FORMAT = "toy-rounds"
COMPUTE_US, ROUND_US, ROUNDS = 3000.0, 500.0, 8


class ToySettings(SchemeSettings, tag="toy", frozen=True, kw_only=True):
    """What plans of such jobs change."""

    rounds: int | None = None

    title = "the toy"
    positive = ("rounds",)
    words: ClassVar[Mapping[str, Any]] = {"rounds": counted("round")}


class Rounds(Knob):
    """How many rounds a step waits for."""

    name = "rounds"
    fields = ("rounds",)

    def legal(self, plan: Plan) -> str | None:
        return None if (ToySettings.of(plan).rounds or 1) <= ROUNDS else f"rounds: a toy job has {ROUNDS} at most"

    @cached_property
    def choice(self) -> Choice:
        grids = {RECORDED: ({},), "set": grid("rounds", range(1, ROUNDS))}
        return Choice(name=self.name, fields=self.fields, grids=grids)


@dataclass(frozen=True)
class ToyReplay:
    """The replay of one graph."""

    graph: ReplayGraph

    @property
    def op_count(self) -> int:
        return len(self.graph)

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        iteration_us, settled = settled_us(self.graph)
        return IterationTimes(iteration_us=iteration_us, settled=settled, breakdown_us={"compute": COMPUTE_US})

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        return np.full(samples, self.iterations().iteration_us)

    def timeline(self) -> Timeline:
        return replay(self.graph)


class ToyJob(Job):
    title = "a toy job"
    askable = ("rounds",)
    settings = ("compute", "communication")

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace)
        return cls(trace)

    def __init__(self, trace: Trace) -> None:
        self.trace, self.tensors = trace, trace.tensors
        facts = PlanningFacts(name=self.title, tensors=trace.tensors, values={"rounds": ROUNDS})
        self.space = PlanSpace(facts, [Rounds(facts)])

    def plans(self, scenario: Scenario) -> PlanSpace:
        return self.space

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        self.space.check(scenario.plan)
        graph = _graph(ToySettings.of(scenario.plan).rounds or ROUNDS)
        for scale in scenario.scales:
            graph = graph_change(scale, 1).apply(graph)
        return Lowered(
            replayable=ToyReplay(graph),
            error=ErrorModel(model=0.1),
            as_recorded=scenario == Scenario(),
            cluster=ClusterSpec.of(self.trace.meta),
        )

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        timeline = here.timeline(Plan())
        fewer_us = here.predict(Plan.of(rounds=1)).iteration_us
        gain_us = timeline.iteration_us - fewer_us
        return Diagnosis(
            iteration_us=timeline.iteration_us,
            measured_iteration_us=here.measurement.median_us,
            critical_path=path_totals(timeline),
            critical_ops=critical_ops(timeline),
            ranks=(RankFacts(rank=0),),
            gains=(PredictedGain(what_if="rounds=1", predicted_iteration_us=fewer_us, gain_us=gain_us),),
            findings=("Rounds take most of a step.",),
            warnings=(),
        )


def _graph(rounds: int) -> ReplayGraph:
    builder = GraphBuilder()
    (thread,) = builder.add_devices(np.arange(1), OrderPolicy.PROGRAM, "thread {0}", (range(1),))
    builder.add_ops(np.full(1, thread), np.full(1, COMPUTE_US), kind=OpKind.FORWARD, name="compute", axes=(range(1),))
    builder.add_ops(np.full(rounds, thread), np.full(rounds, ROUND_US), kind=OpKind.COMM, name="round {0}", axes=(range(rounds),))
    return builder.build()


def rounds_part(plan: Plan, facts: DeployedFacts) -> Part:
    return Part(env={"TOY_ROUNDS": str(ToySettings.of(plan).rounds or ROUNDS)})


TARGET = Target(name="toy", fields=("rounds",), part=rounds_part, communicates=True)


@dataclass(frozen=True, kw_only=True)
class ToyLauncher(Launcher):
    """Runs the command once; it prints how long each step took, in seconds."""

    framework: str = "toy"
    comm: str = "rounds"
    format: str = FORMAT
    environment: str = "none"
    modules: tuple[str, ...] = ()

    def start(self, run: LaunchedJob) -> None:
        done = subprocess.run(run.spec.command, env=dict(run.spec.env), capture_output=True, text=True, check=True)
        (run.folder / "rank0").mkdir()
        (run.folder / "rank0" / "steps").write_text(done.stdout)

    def assemble(self, raw: Path) -> Trace:
        return toy_trace(read_job(raw, RawJobFile, FORMAT).command)

    def read_hook(self, folder: Path) -> RankFile:
        lengths_ns = [round(float(line) * 1e9) for line in (folder / "steps").read_text().split()]
        ends_ns = np.cumsum(lengths_ns).tolist()
        steps = [(end - length, end, 0, 0, False) for length, end in zip(lengths_ns, ends_ns, strict=True)]
        return RankFile(rank=0, host="h0", machine="m", cores=[], steps=steps, peak_rss_bytes=0, versions={})


class ToyKind(Kind):
    title = ToyJob.title
    targets = (TARGET,)
    formats = (FORMAT,)
    job_type = ToyJob
    launchers = (ToyLauncher(),)


KIND = ToyKind()

SCRIPT = f"""import os, time
for _ in range(12):
    begin = time.perf_counter()
    time.sleep({COMPUTE_US / 1e6} + {ROUND_US / 1e6} * int(os.environ.get("TOY_ROUNDS", {ROUNDS})))
    print(time.perf_counter() - begin)
"""


def toy_script(folder: Path) -> tuple[str, ...]:
    """The command of such a job."""
    script = folder / "toy.py"
    script.write_text(SCRIPT)
    return (sys.executable, str(script))


def toy_trace(command: tuple[str, ...]) -> Trace:
    """What is recorded of it."""
    count, length_us = 12, COMPUTE_US + ROUNDS * ROUND_US
    start_us = np.arange(count) * length_us
    ones, zeros = np.ones(count, np.int64), np.zeros(count, np.int64)
    steps = Steps(
        rank=zeros,
        index=np.arange(count),
        start_us=start_us,
        end_us=start_us + length_us,
        traced=np.arange(count) >= 9,
        compute_cpu_us=np.full(count, COMPUTE_US),
        comm_cpu_us=np.zeros(count),
    )
    events = Events(
        name=zeros,
        kind=ones * EventKind.OP,
        rank=zeros,
        stream=zeros,
        start_us=start_us,
        end_us=start_us + COMPUTE_US,
        step=np.arange(count),
        tensor=zeros - 1,
        collective=zeros - 1,
        size_bytes=zeros,
    )
    meta = TraceMeta(
        framework="toy",
        comm="rounds",
        ranks=1,
        hosts=("h0",),
        cores=(-1,),
        format=FORMAT,
        clock=ClockReport(offset_us=(0.0,), residual_us=(0.0,), method="one clock"),
        command=command,
    )
    tensor = TensorInfo(name="t", node="t", dtype="float32", shape=(4,), size_bytes=16)
    return Trace(meta=meta, names=("compute",), events=events, steps=steps, tensors=(tensor,), graphs=(), graph_of_rank=())
