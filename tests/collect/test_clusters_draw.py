"""Random clusters of a step: convex, connected, of eligible ops, within the size."""

import importlib.util
import random
import sys

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.runtime import WORKERS


def loaded():
    """The module as the measuring process has it."""
    spec = importlib.util.spec_from_file_location("dpro_search_cluster_draw", WORKERS / "dpro_search_cluster_draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


draw = loaded()


@st.composite
def graphs(draw_value):
    """(predecessors, eligible, heavy) of a random graph in topological order."""
    size = draw_value(st.integers(2, 40))
    predecessors = [sorted(draw_value(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(size)]
    flags = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    return predecessors, [value > 1 for value in draw_value(flags)], [value > 7 for value in draw_value(flags)]


def step_dag(predecessors, eligible, heavy):
    neighbours = [set() for _ in predecessors]
    for node, sources in enumerate(predecessors):
        for source in sources:
            if eligible[node] and eligible[source]:
                neighbours[node].add(source)
                neighbours[source].add(node)
    return draw.StepDag(predecessors, neighbours, eligible, heavy)


@settings(max_examples=100, deadline=None)
@given(graph=graphs(), seed=st.integers(0, 1000), largest=st.integers(2, 20))
def test_a_cluster_is_convex_connected_eligible_and_within_the_size(graph, seed, largest):
    predecessors, eligible, _ = graph
    members = step_dag(*graph).draw(random.Random(seed), largest)
    if members is None:
        return
    assert 2 <= len(members) <= largest
    assert all(eligible[node] for node in members)
    view = nx.DiGraph([(source, node) for node, sources in enumerate(predecessors) for source in sources])
    assert nx.is_weakly_connected(view.subgraph(members))
    for node in set(view) - set(members):
        behind, before = nx.descendants(view, node), nx.ancestors(view, node)
        assert not (behind & set(members) and before & set(members)), "a path leaves the cluster and comes back"


def test_a_path_through_an_ineligible_node_keeps_its_ends_apart():
    # 0 -> 1 -> 2 and 0 -> 2, where 1 may not be in a cluster: 0 and 2 together would wait for themselves.
    dag = step_dag([[], [0], [0, 1]], [True, False, True], [False] * 3)
    assert all(dag.draw(random.Random(seed), 3) is None for seed in range(50))


def test_equal_seeds_draw_equal_clusters():
    dag = step_dag([[], [0], [0], [1, 2], [3], [3]], [True] * 6, [False] * 6)
    assert [dag.draw(random.Random(5), 6) for _ in range(3)] == [dag.draw(random.Random(5), 6)] * 3
