"""``dpro-search import`` of a job of many ranks, whose profiles are copies of one real Kineto profile, as JSON.

    python -m benchmarks.many_ranks PROFILE [--ranks 1000]

Prints seconds, CPU time and peak memory. The copies differ in the rank that they say they are of.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import machine, process_usage
from dpro_search.collect.readers._bytes import read_whole

_RANK = re.compile(rb'("rank": ?)\d+(, ?"world_size": ?)\d+')


def main() -> None:
    """Write the profiles, import them in a process of its own, print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--ranks", type=int, default=1000)
    args = parser.parse_args()
    data = read_whole(args.profile)
    with tempfile.TemporaryDirectory() as folder:
        profiles = Path(folder) / "profiles"
        profiles.mkdir()
        for rank in range(args.ranks):
            copy = _RANK.sub(rb"\g<1>%d\g<2>%d" % (rank, args.ranks), data)
            (profiles / f"rank{rank}.json").write_bytes(copy)
        command = [sys.executable, "-m", "dpro_search.cli", "import", str(profiles), "--out", str(Path(folder) / "trace"), "--json"]
        used = process_usage(command)
    print(json.dumps({"machine": machine(), "ranks": args.ranks, "profile_bytes": len(data)} | used))


if __name__ == "__main__":
    main()
