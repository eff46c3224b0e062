"""NCCL: which algorithm and protocol it uses for which size, in each group of ranks of a plan, by the cost model.

The file is that of NCCL's tuner plugin (``ext-tuner/example`` in its sources; NCCL 2.19 and later load one): a line for each range
of sizes of a collective, and the first that fits a call counts. A call's group is known to it by its hosts and ranks only: of two
groups that have as many of both, the first listed counts. Without the plugin, NCCL_ALGO and NCCL_PROTO (with lists by collective
from 2.24 on) leave out what is nowhere the fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dpro_search.cluster import Cluster
from dpro_search.costmodel.collectives.nccl import FastestWay, Placement, choices
from dpro_search.deploy.parts.part import FOLDER, JobFacts, Part
from dpro_search.errors import InputError
from dpro_search.parallel.costs.groups import Groups
from dpro_search.parallel.export.workloads import planned
from dpro_search.space.plan import Plan

MOST_BYTES = 2**62  # of the last range of sizes
_COLLECTIVES = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}
_ALGORITHMS = {"ring": "ring", "tree": "tree", "switch": "nvls", "switch and tree": "nvls_tree"}
_AXES = ("tp", "cp", "replicas", "shard", "shard replicas", "ep", "etp", "expert replicas", "expert shard", "world")
_FILE, _PLAIN = "nccl_tuner.conf", "nccl_algorithms.env"
_HEAD = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"


@dataclass(frozen=True, kw_only=True)
class TunedGroup:
    """A group of ranks with the fastest ways of its collectives, by NCCL's names of these."""

    name: str
    nodes: int
    ranks: int
    ways: Mapping[str, Sequence[FastestWay]]


def nccl_part(plan: Plan, facts: JobFacts) -> Part:
    """The tuner plugin's file for all groups of a plan, and variables that name it."""
    workload = planned(plan, facts)
    groups = tuned_groups(workload.cluster, Groups(workload.strategy, workload.cluster).placements)
    if not groups:
        raise InputError("nccl: one device communicates with nobody: there is nothing to choose")
    return Part(
        env={"NCCL_TUNER_PLUGIN": "example", "NCCL_TUNER_CONFIG_FILE": f"{FOLDER}/{_FILE}"},
        files={_FILE: tuner_file(workload.cluster.name, groups), _PLAIN: plain_settings(groups)},
        setup=(
            "NCCL finds `libnccl-tuner-example.so` (`make` in `ext-tuner/example` of its sources) in LD_LIBRARY_PATH.",
            f"Without it, `{_PLAIN}` leaves NCCL the choice among what is the fastest for some size.",
            "What is chosen is predicted, not measured: compare both with NCCL's own choice in nccl-tests before a long run.",
        ),
    )


def tuned_groups(cluster: Cluster, placements: Mapping[str, Placement]) -> tuple[TunedGroup, ...]:
    """Groups of several ranks, by the name of their axis; of those with as many hosts and ranks the first."""
    groups: dict[tuple[int, int], TunedGroup] = {}
    for axis in sorted(placements, key=lambda name: _AXES.index(name) if name in _AXES else len(_AXES)):
        place = placements[axis]
        key = place.nodes, place.ranks
        if place.ranks > 1 and key not in groups and axis not in ("pp", "first and last stage"):
            ways = {theirs: choices(ours, cluster, place) for ours, theirs in _COLLECTIVES.items()}
            groups[key] = TunedGroup(name=axis, nodes=place.nodes, ranks=place.ranks, ways=ways)
    return tuple(groups.values())


def tuner_file(cluster: str, groups: Sequence[TunedGroup]) -> bytes:
    """The lines of all groups, as the plugin reads them."""
    lines = [f"# NCCL's fastest ways on {cluster}, as predicted", f"# {_HEAD}"]
    for group in groups:
        lines.append(f"# {group.name}: {group.ranks} ranks on {group.nodes} hosts")
        for collective, ways in group.ways.items():
            ends = [following.from_bytes - 1 for _, following in pairwise(ways)]
            for way, end in zip(ways, [*ends, MOST_BYTES], strict=True):
                how = f"{_ALGORITHMS[way.algorithm]},{way.protocol.lower()}"
                lines.append(f"{collective},{way.from_bytes},{end},{how},-1,{group.nodes},{group.ranks},-1,-1")
    return "".join(f"{line}\n" for line in lines).encode()


def plain_settings(groups: Sequence[TunedGroup]) -> bytes:
    """NCCL_ALGO and NCCL_PROTO: what all-reduces may use; other collectives stay as they are."""
    ways = [way for group in groups for way in group.ways["allreduce"]]
    algorithms = dict.fromkeys(_ALGORITHMS[way.algorithm].replace("_", "") for way in ways)
    protocols = dict.fromkeys(way.protocol for way in ways)
    return f"NCCL_ALGO='allreduce:{','.join(algorithms)}'\nNCCL_PROTO='allreduce:{','.join(protocols)}'\n".encode()
