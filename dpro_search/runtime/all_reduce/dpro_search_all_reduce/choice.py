"""`Choice`: a table of the algorithm that an all-reduce uses, by ranks, ranks on a host, and size.

`dpro-search fit` writes it as JSON from all-reduces that were measured, or predicted:

    {"version": 1, "origin": "...", "tables": [{"ranks": 8, "ranks_per_host": 2,
      "ranges": [{"from_bytes": 0, "algorithm": "native", "segment_bytes": 0, "alternatives": ["ring"]}, ...]}]}

A job of other numbers of ranks uses the table that is nearest to it: ranks per host first, then ranks, by their ratio. Alternatives
are algorithms that may be as fast as the chosen one; `check` times them.
"""

import bisect
import json
import math
from typing import Tuple

from .library import MPICH, OPEN_MPI
from .rounds import ALGORITHMS

NATIVE = "native"  # the MPI library's own all-reduce, by the algorithm of its choice
OF_LIBRARY = NATIVE + " "  # before the name of one of its algorithms
KNOWN = (NATIVE, *ALGORITHMS, *sorted(OF_LIBRARY + name for name in {*OPEN_MPI, *MPICH} - {"default"}))
# Bytes of the segments of a message, by what is said of them after the algorithm's name; small ones are what Open MPI sends at
# once over TCP (btl_tcp_eager_limit, 64 KiB with a header): larger messages wait for an answer, behind what comes the other way.
SEGMENTS = {"": 0, " in segments": 1 << 18, " in small segments": 60 << 10}
_ALTERNATIVES = {name + segments for name in KNOWN for segments in SEGMENTS}
DEFAULT = {"version": 1, "origin": "nothing measured", "tables": []}
_LARGE_BYTES = 1 << 20
_LARGE = {"Open MPI": "ring in small segments"}
_LARGE_ALTERNATIVES = ("ring", "halving-doubling")  # nothing was measured: which of them is faster depends on the network


class Choice:
    """Algorithms by size.

    Parameters
    ----------
    table
        As in the file.
    """

    def __init__(self, table=None, where="the table of all-reduces"):
        table = DEFAULT if table is None else table
        self._tables = []
        try:
            if table["version"] != 1:
                raise ValueError("it has version %r, and this reads version 1" % (table["version"],))
            for one in table["tables"]:
                self._tables.append((int(one["ranks"]), int(one["ranks_per_host"]), _checked(one["ranges"])))
        except (KeyError, TypeError, ValueError) as error:
            reason = "%s is missing" % error if isinstance(error, KeyError) else error
            raise ValueError("%s: %s" % (where, reason)) from None

    @classmethod
    def load(cls, path):
        """The table of a file; raises `ValueError` for one that is no such table."""
        with open(path) as file:
            try:
                table = json.load(file)
            except ValueError as error:
                raise ValueError("%s: no JSON: %s" % (path, error)) from None
        return cls(table, str(path))

    def ranges(self, ranks, ranks_per_host, library=None):
        """(from bytes, algorithm, bytes of a segment), ascending from 0, for a job over an MPI library of that name.

        Without a table: small buffers as the library sums them, whose C is quicker than Python, large ones around a ring.
        """
        return [row[:3] for row in self._rows(ranks, ranks_per_host, library)]

    def alternatives(self, ranks, ranks_per_host, size_bytes, library=None):
        """(algorithm, bytes of a segment) of what may be as fast as the choice for so many bytes, the likeliest first."""
        rows = self._rows(ranks, ranks_per_host, library)
        return [parted(name) for name in rows[_place(rows, size_bytes)][3]]

    def _rows(self, ranks, ranks_per_host, library):
        """(from bytes, algorithm, bytes of a segment, names of alternatives) of the nearest table."""
        if not self._tables:
            large = parted(_LARGE.get(library, "ring in segments"))
            return [(0, NATIVE, 0, ()), (_LARGE_BYTES, *large, _LARGE_ALTERNATIVES)]

        def distance(one):
            return abs(math.log(one[1] / ranks_per_host)), abs(math.log(one[0] / ranks))

        rows = min(self._tables, key=distance)[2]
        if ranks_per_host == 1:  # then a hierarchy is what it does among hosts
            rows = [(row[0], _without_hosts(row[1]), row[2], tuple(map(_without_hosts, row[3]))) for row in rows]
        return rows


def _without_hosts(name):
    return "halving-doubling" if name == "hierarchy" else name


def parted(name: str) -> Tuple[str, int]:
    """(algorithm, bytes of a segment) of a name like "ring in segments"."""
    algorithm, said, kind = name.partition(" in ")
    return algorithm, SEGMENTS[said + kind]


def joined(algorithm: str, segment_bytes: int) -> str:
    """The name of an algorithm with segments of so many bytes, if such ones have a name; else the algorithm's."""
    return algorithm + next((said for said, size in SEGMENTS.items() if size == segment_bytes), "")


def of_size(ranges, size_bytes):
    """The algorithm and segment of an all-reduce of so many bytes."""
    return ranges[_place(ranges, size_bytes)][1:3]


def _place(rows, size_bytes):
    return bisect.bisect_right([row[0] for row in rows], size_bytes) - 1


def _checked(ranges):
    rows = [
        (int(one["from_bytes"]), one["algorithm"], int(one.get("segment_bytes", 0)), tuple(one.get("alternatives", ())))
        for one in ranges
    ]
    starts = [row[0] for row in rows]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
        raise ValueError("ranges must begin at 0 bytes and ascend, not %s" % starts)
    unknown = [row[1] for row in rows if row[1] not in KNOWN]
    unknown += [name for row in rows for name in row[3] if name not in _ALTERNATIVES]
    if unknown:
        raise ValueError("algorithm %r is unknown (known: %s)" % (unknown[0], ", ".join(KNOWN)))
    if min(row[2] for row in rows) < 0:
        raise ValueError("segment_bytes must be at least 0")
    return rows
