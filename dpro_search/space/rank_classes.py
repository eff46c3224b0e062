"""Ranks that behave alike: one of them is replayed, with how many of its kind share its core, and stands for all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import Ints


class HostGroups(NamedTuple):
    """Ranks of groups of hosts that behave alike: one host of each group, with a rank of each class, stands for the group."""

    class_of_rank: Ints  # Class of each rank, [ranks].
    first_rank: Ints  # The rank that stands for each class, [classes].
    ranks: Ints  # Ranks in each class, [classes].
    host: Ints  # Number of the host that stands for the class's group, [classes].
    hosts: Ints  # Hosts in each group, [groups].


class Classes(NamedTuple):
    """Ranks in classes that behave alike, numbered by their first rank."""

    class_of_rank: Ints  # Class of each rank, [ranks].
    first_rank: Ints  # The rank that stands for each class, [classes].
    core: Ints  # A core for each class, numbered from 0, [classes]; classes that share their cores share it.
    on_core: Ints  # Ranks of the class on each of its cores, [classes].


def alike(profile: Ints, core: Ints) -> Classes:
    """Classes of ranks with one profile whose cores carry the same profiles, each equally often.

    Ranks act on each other through their core and through negotiations among all, and a negotiation waits for the last rank,
    however many there are. Two such ranks therefore do the same at the same time.

    Parameters
    ----------
    profile, core
        Number of each rank's profile and of its core, [ranks].
    """
    order = np.lexsort((profile, core))
    bounds = np.flatnonzero(np.diff(core[order])) + 1
    kinds: dict[bytes, int] = {}
    kind_of_core = np.array([kinds.setdefault(row.tobytes(), len(kinds)) for row in np.split(profile[order], bounds)])
    kind = np.empty(len(core), dtype=np.int64)
    kind[order] = np.repeat(kind_of_core, np.diff(np.concatenate(([0], bounds, [len(core)]))))
    _, first, members = np.unique(np.stack((kind, profile)), axis=1, return_index=True, return_inverse=True)
    by_first = np.argsort(first)
    number = np.empty(len(first), dtype=np.int64)
    number[by_first] = np.arange(len(first))
    first_rank = first[by_first]
    _, pair, count = np.unique(np.stack((core, profile)), axis=1, return_inverse=True, return_counts=True)
    return Classes(
        class_of_rank=number[members.reshape(-1)],
        first_rank=first_rank,
        core=np.unique(kind[first_rank], return_inverse=True)[1].astype(np.int64),
        on_core=count[pair.reshape(-1)[first_rank]],
    )


def host_groups(profile: Ints, host: Ints, most_classes: int) -> HostGroups:
    """Ranks with one profile on hosts that carry the same profiles, in as many groups of hosts as `most_classes` allows.

    Hosts that carry the same profiles always form at least one group, so there may be more classes than `most_classes`.

    Parameters
    ----------
    profile, host
        Number of each rank's profile and of its host, [ranks].
    """
    classes = alike(profile, host)
    most_groups = max(most_classes // len(classes.first_rank), 1)
    hosts, first_on_host, host = np.unique(host, return_index=True, return_inverse=True)
    kind = classes.core[classes.class_of_rank[first_on_host]]  # [hosts]
    group = np.empty(len(hosts), dtype=np.int64)
    for number in range(int(kind.max()) + 1):
        members = np.flatnonzero(kind == number)
        group[members] = number * most_groups + np.arange(len(members)) * most_groups // len(members)
    group = np.unique(group, return_inverse=True)[1]
    pairs = np.stack((group[host], classes.class_of_rank))
    _, first, members, ranks = np.unique(pairs, axis=1, return_index=True, return_inverse=True, return_counts=True)
    return HostGroups(
        class_of_rank=members.reshape(-1).astype(np.int64),
        first_rank=first,
        ranks=ranks,
        host=group[host[first]].astype(np.int64),
        hosts=np.bincount(group),
    )
