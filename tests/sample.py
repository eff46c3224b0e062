"""The bundled recording, loaded once for all tests."""

import functools

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.kinds.horovod.predictor import Predictor


@functools.cache
def sample() -> Trace:
    return Trace.load(sample_trace_path())


@functools.cache
def predictor() -> Predictor:
    return Predictor.from_trace(sample())
