"""Algorithms of all-reduces as Open MPI's files of rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpro_search.collect.launch.hierarchy import among_hosts, hierarchy_env, hierarchy_rules
from dpro_search.costmodel.collectives.counts import HIERARCHY, MpiAlgorithm
from dpro_search.deploy.parts.part import FOLDER, JobFacts, Part
from dpro_search.errors import InputError
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.library import OPEN_MPI, OPEN_MPI_OBEYS

Ranges = Sequence[tuple[int, MpiAlgorithm]]  # from how many bytes

_RULES, _HIERARCHY_RULES = "allreduce.rules", "hierarchy.rules"
_TUNED = {
    OPEN_MPI_OBEYS: "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": f"{FOLDER}/{_RULES}",
}
_TUNED_ALLREDUCE = 2  # its number among Open MPI's collectives


def algorithm_part(ranges: Ranges, facts: JobFacts) -> Part:
    """Open MPI's rules for algorithms of all-reduces; raises `InputError` if the job cannot use a hierarchy."""
    if all(algorithm != HIERARCHY for _, algorithm in ranges):
        files, env = {_RULES: _rules({1: ranges})}, _TUNED
    else:
        if facts.ranks is None or facts.ranks_per_host is None:
            raise InputError("allreduce_algorithms: a hierarchy needs a recording with the same number of ranks on every host")
        if facts.ranks_per_host == 1:
            raise InputError(
                "allreduce_algorithms: a hierarchy needs several ranks on a host, on each of several hosts; here it has one"
            )
        hosts = facts.ranks // facts.ranks_per_host
        by_ranks: dict[int, Ranges] = {hosts: ((0, among_hosts(hosts)),)}
        if flat := [(start, algorithm) for start, algorithm in ranges if algorithm != HIERARCHY]:
            by_ranks[facts.ranks] = ((0, flat[0][1]), *flat[1:])
        in_hierarchy = hierarchy_rules([(start, algorithm == HIERARCHY) for start, algorithm in ranges])
        files = {_RULES: _rules(by_ranks), _HIERARCHY_RULES: in_hierarchy}
        env = {**_TUNED, **hierarchy_env(f"{FOLDER}/{_HIERARCHY_RULES}")}
    named = " and ".join(f"`{name}`" for name in files)
    setup = f"Horovod must communicate by Open MPI, and {named} lie at the same path on all hosts."
    return Part(env=env, files=files, setup=(setup,))


def _rules(by_ranks: Mapping[int, Ranges]) -> bytes:
    """Open MPI's file of rules (coll/tuned, as 4.x reads it): a line for each range, for all-reduces of that many ranks or more."""
    lines = ["1  # collective", f"{_TUNED_ALLREDUCE}  # all-reduce", f"{len(by_ranks)}  # number of ranks"]
    for ranks, ranges in by_ranks.items():
        lines += [
            f"{ranks}  # or more",
            f"{len(ranges)}  # ranges: from how many bytes, algorithm, fan-out and segment of its choice",
            *(f"{start} {OPEN_MPI[algorithm]} 0 0" for start, algorithm in ranges),
        ]
    return "".join(f"{line}\n" for line in lines).encode()
