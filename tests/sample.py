"""The bundled recording of a Horovod job, loaded once for all tests."""

import functools
from pathlib import Path

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.kinds import PlanOptions
from dpro_search.kinds._measured import MeasuredStep
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.replay.horovod.schedule import HorovodSchedule
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario

HOROVOD_SAMPLE = "resnet50_2ranks_2gbit"


def horovod_trace_path() -> Path:
    return sample_trace_path(HOROVOD_SAMPLE)


@functools.cache
def sample() -> Trace:
    return Trace.load(horovod_trace_path())


@functools.cache
def horovod() -> Horovod:
    return Horovod.of(sample(), PlanOptions())


def measured() -> MeasuredStep[DataflowGraph]:
    """The recorded step: its graph and the costs of its communication."""
    return horovod().measured


def schedule(plan: Plan | None = None, *changes: str) -> HorovodSchedule:
    """The schedule of the job under a plan, with changes as text."""
    job = horovod()
    replayable = job.lower(job.scenario(changes, Scenario(plan=plan or Plan()))).replayable
    assert isinstance(replayable, HorovodSchedule)
    return replayable
