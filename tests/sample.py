"""The bundled recording of a Horovod job, loaded once for all tests."""

import functools
from pathlib import Path

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.kinds.horovod.predictor import Predictor

HOROVOD_SAMPLE = "resnet50_2ranks_2gbit"


def horovod_trace_path() -> Path:
    return sample_trace_path(HOROVOD_SAMPLE)


@functools.cache
def sample() -> Trace:
    return Trace.load(horovod_trace_path())


@functools.cache
def predictor() -> Predictor:
    return Predictor.from_trace(sample())
