"""A recorded PyTorch job of two ranks whose model is a row of blocks."""

from pathlib import Path

import pytest

from dpro_search.collect.torch_assemble import assemble_ddp
from dpro_search.collect.trace import Trace
from dpro_search.graph.ddp import DdpGraph, build_ddp_graph


@pytest.fixture(scope="session")
def blocks_trace() -> Trace:
    return assemble_ddp(Path(__file__).parents[2] / "data" / "ddp_blocks")


@pytest.fixture(scope="session")
def blocks_graph(blocks_trace) -> DdpGraph:
    return build_ddp_graph(blocks_trace)
