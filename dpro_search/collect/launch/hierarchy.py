"""How Open MPI (4.1) is configured to sum in a hierarchy: within each host, among the hosts' first ranks, and back.

Its component `coll/han` has two all-reduces. The one that goes in segments ends in a segmentation fault where the sum takes the
place of what is summed and is larger than a segment, as Horovod's are; so that `hierarchy_env` selects the other, which takes
three steps one after the other. Sizes that are not to go in a hierarchy are sent to a component that has no all-reduce of this
kind (`libnbc`), on which han gives them back to the one that would have them without it (`tuned`, whose own rules decide how);
named outright, `tuned` fails in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

_ALLREDUCE = 2  # Open MPI's numbers of its collectives, coll_base_functions.h
_OTHERS = {
    0: "all-gather",
    1: "all-gather of several sizes",
    6: "barrier",
    7: "broadcast",
    9: "gather",
    11: "reduce",
    15: "scatter",
}
_AMONG_HOSTS, _WORLD = 1, 2  # and of levels


def among_hosts(hosts: int) -> Literal["recursive-doubling", "ring"]:
    """How the hosts' first ranks are to reduce: two by one exchange (a ring of two may be half-duplex), more in a ring."""
    return "recursive-doubling" if hosts == 2 else "ring"


def hierarchy_env(rules: str | Path) -> dict[str, str]:
    """Variables of all ranks that have `hierarchy_rules`, which lie at a path, followed."""
    return {
        "OMPI_MCA_coll_han_priority": "100",
        "OMPI_MCA_coll_han_use_simple_allreduce": "1",
        "OMPI_MCA_coll_han_use_dynamic_file_rules": "1",
        "OMPI_MCA_coll_han_dynamic_rules_filename": str(rules),
        "OMPI_MCA_coll_han_max_dynamic_errors": "0",  # it would report that it gives back what it is to give back
    }


def hierarchy_rules(ranges: Sequence[tuple[int, bool]]) -> bytes:
    """Open MPI's file of rules for `coll/han`.

    Parameters
    ----------
    ranges
        From how many bytes on all-reduces are in a hierarchy or not, from 0 on.
    """
    lines = [
        f"{1 + len(_OTHERS)}  # collectives",
        f"{_ALLREDUCE}  # all-reduce",
        "2  # levels",
        *_level(_AMONG_HOSTS, "among hosts", [(0, "tuned")]),
        *_level(_WORLD, "all ranks", [(start, "han" if chosen else "libnbc") for start, chosen in ranges]),
    ]
    for number, name in _OTHERS.items():
        lines += [f"{number}  # {name}, as ever", "1  # level", *_level(_WORLD, "all ranks", [(0, "libnbc")])]
    return "".join(f"{line}\n" for line in lines).encode()


def _level(number: int, name: str, rules: Sequence[tuple[int, str]]) -> list[str]:
    return [
        f"{number}  # {name}",
        "1  # number of ranks",
        "1  # or more",
        f"{len(rules)}  # ranges: from how many bytes, and whose",
        *(f"{start} {component}" for start, component in rules),
    ]
