"""The benchmark's graphs are the ones whose makespans are known."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_graphs import build
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.reference import replay_reference

_DEFINITION = Path(__file__).parents[3] / "shared/bench/replay_graphs.py"


@pytest.mark.parametrize(("kind", "workers", "layers"), [("ring", 3, 4), ("ring", 2, 1), ("coarse", 4, 3), ("coarse", 1, 2)])
def test_ops_and_dependencies_are_those_of_the_definition(kind, workers, layers):
    if not _DEFINITION.exists():
        pytest.skip("the shared definition of the graphs is not beside this checkout")
    spec = importlib.util.spec_from_file_location("replay_graphs", _DEFINITION)
    definition = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(definition)
    theirs, ours = definition.build(kind, workers, layers), build(kind, workers, layers)
    np.testing.assert_array_equal(ours.duration_us, theirs.duration_us)
    np.testing.assert_array_equal(ours.device, theirs.device)
    np.testing.assert_array_equal(ours.priority, theirs.priority)
    edges = sorted(zip(*(array.tolist() for array in ours.edges()), strict=True))
    assert edges == sorted(zip(theirs.src.tolist(), theirs.dst.tolist(), strict=True))


@pytest.mark.parametrize(("kind", "workers", "layers", "ops"), [("ring", 8, 39, 9_984), ("coarse", 8, 250, 10_000)])
def test_size_is_known_from_workers_and_layers(kind, workers, layers, ops):
    graph = build(kind, workers, layers)
    graph.validate()
    assert len(graph) == ops
    assert graph.pred_idx.dtype == graph.device.dtype == np.int32
    assert set(np.unique(graph.kind)) == {OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.COMM, OpKind.HOST}


@pytest.mark.parametrize(("kind", "workers", "layers", "makespan_us"), [("ring", 8, 39, 26_652)])
def test_the_reference_gives_the_known_makespan(kind, workers, layers, makespan_us):
    assert replay_reference(build(kind, workers, layers)).end_us.max() == makespan_us


@pytest.mark.parametrize(
    ("kind", "workers", "layers", "makespan_us"), [("ring", 8, 39, 26_652), ("ring", 8, 391, 262_506), ("coarse", 8, 250, 165_914)]
)
def test_the_engine_gives_the_known_makespan(kind, workers, layers, makespan_us):
    replayer = pytest.importorskip("dpro_search.replay.replayer")
    assert replayer.replay(build(kind, workers, layers)).iteration_us == makespan_us


@pytest.mark.parametrize(("kind", "workers", "layers"), [("tree", 2, 2), ("ring", 0, 2), ("coarse", 2, 0)])
def test_what_is_no_graph_is_refused(kind, workers, layers):
    with pytest.raises(InputError, match="ring:WORKERS:LAYERS"):
        build(kind, workers, layers)
