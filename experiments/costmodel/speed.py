"""How much processor time a thousand predictions of fused ops take: of clusters of a table, and of what a search asks for.

    OMP_NUM_THREADS=1 python -m experiments.costmodel.speed dpro_search/samples/xla-clusters.jsonl.gz --trace TRACE

The first call of all compiles, and does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dpro_search.collect.tables.clusters import read_table
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.fused.clusters import ClusterCosts, ClusterTimes, default_model
from dpro_search.costmodel.fused.features import shaped_features
from dpro_search.costmodel.fused.flatten import flatten
from dpro_search.graph.build import build_graph
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import horovod_facts
from dpro_search.space.transformations.compute import ComputeGraph
from dpro_search.space.transformations.op_fusion import OpFusion

_COUNT, _REPEATS = 1000, 9


class _Noted:
    """Prices, with a note of what was asked."""

    def __init__(self, costs: ClusterCosts) -> None:
        self._costs = costs
        self.asked: dict[tuple[str, ...], None] = {}

    def times(self, clusters: Sequence[Sequence[str]]) -> ClusterTimes:
        self.asked |= dict.fromkeys(map(tuple, clusters))
        return self._costs.times(clusters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="TABLE", type=Path)
    parser.add_argument("--trace", type=Path, help="recording of a TensorFlow job with Horovod, best one with shapes")
    options = parser.parse_args()
    estimator = default_model().shaped
    clusters = [row.cluster for row in read_table(options.table).measured[:_COUNT]]
    flat = flatten(clusters)
    features = shaped_features(flat)
    ops, parts = len(flat.op) / len(clusters), len(features.parts) / len(clusters)
    print(f"{len(clusters)} clusters of the table, {ops:.0f} ops and {parts:.0f} parts each")
    print(f"  made arrays     {_least_ms(lambda: flatten(clusters)):6.1f} ms")
    print(f"  features        {_least_ms(lambda: shaped_features(flat)):6.1f} ms")
    print(f"  prediction      {_least_ms(lambda: estimator.predict_interval(features)):6.1f} ms")
    if options.trace is not None:
        trace = Trace.load(options.trace)
        graph = build_graph(trace)
        costs = ClusterCosts(default_model(), graph, recorded=trace.graphs[trace.graph_of_rank[0]])
        noted = _Noted(costs)
        facts = horovod_facts(graph.tensors, trace.horovod_settings)
        OpFusion(facts, ComputeGraph(graph), noted).suggested(Plan(), {})
        asked = list(noted.asked)
        for name, chosen in (("first", asked[:_COUNT]), ("last", asked[-_COUNT:])):
            ops = sum(map(len, chosen)) / len(chosen)
            shaped = "with" if costs.times(chosen).shaped.all() else "without"
            spent = _least_ms(lambda chosen=chosen: costs.times(chosen))
            print(f"the {name} {len(chosen)} candidates of a search, {ops:.1f} ops, {shaped} shapes: {spent:.1f} ms in all")


def _least_ms(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(_REPEATS):
        began_s = time.process_time()
        call()
        found.append(time.process_time() - began_s)
    return min(found) * 1e3


if __name__ == "__main__":
    main()
