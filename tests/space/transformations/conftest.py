"""A recorded PyTorch job of two ranks whose model is a row of blocks."""

import pytest

from dpro_search.collect.trace import Trace
from dpro_search.graph.ddp import DdpGraph, build_ddp_graph
from tests.recordings import trace_of


@pytest.fixture(scope="session")
def blocks_trace() -> Trace:
    return trace_of("ddp_blocks")


@pytest.fixture(scope="session")
def blocks_graph(blocks_trace) -> DdpGraph:
    return build_ddp_graph(blocks_trace)
