"""Import of a large Kineto profile, made from a real one by repetition: seconds and peak memory, as JSON.

    python benchmarks/kineto_import.py PROFILE [--events 1000000] [--keep FILE]

Each copy is moved in time, and its correlation ids and step numbers with it, so that it reads like one long recording. With
``--keep`` the file stays. ``--baseline COMMAND`` runs another program on it in the same run; ``{}`` stands for the file.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import machine, process_usage
from dpro_search.collect.readers._bytes import read_whole

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_TIME = re.compile(rb'("ts": )(\d+)')
_ID = re.compile(rb'("correlation": |"External id": |"id": )(\d+)')
_STEP = re.compile(rb"ProfilerStep#(\d+)")
_IMPORT = "import sys; from pathlib import Path; from dpro_search.collect.readers.importers import import_trace; "
_IMPORT += "print(len(import_trace([Path(sys.argv[1])]).events))"


def main() -> None:
    """Make the file, read it in a process of its own, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--baseline", metavar="COMMAND")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "profile.json"
        events = repeat(args.profile, path, args.events)
        result = {"machine": machine(), "events": events, "json_bytes": path.stat().st_size}
        result |= process_usage([sys.executable, "-c", _IMPORT, str(path)])
        if args.baseline:
            command = [word.replace("{}", str(path)) for word in shlex.split(args.baseline)]
            result["baseline"] = process_usage(command)
    print(json.dumps(result))


def repeat(profile: Path, path: Path, events: int) -> int:
    """Write a profile with at least so many records; returns how many."""
    data = read_whole(profile)
    start = next(_LIST.finditer(data)).end()
    end = data.rindex(b"]")
    end = data.rindex(b"\n  ]", 0, end + 1) if b"\n  ]" in data[start : end + 1] else end
    body = data[start:end]
    records = body.count(b'"ph":')
    times = [int(match[2]) for match in _TIME.finditer(body)]
    numbers = [int(match[1]) for match in _STEP.finditer(body)]
    length_us, ids = max(times) - min(times) + 1, max(int(match[2]) for match in _ID.finditer(body)) + 1
    steps = max(numbers, default=0) - min(numbers, default=0) + 1
    copies = -(-events // records)
    with path.open("wb") as file:
        file.write(data[:start])
        for copy in range(copies):
            text = _TIME.sub(lambda match, by=copy * length_us: match[1] + str(int(match[2]) + by).encode(), body)
            text = _ID.sub(lambda match, by=copy * ids: match[1] + str(int(match[2]) + by).encode(), text)
            text = _STEP.sub(lambda match, by=copy * steps: b"ProfilerStep#" + str(int(match[1]) + by).encode(), text)
            file.write(b"," * bool(copy) + text)
        file.write(data[end:])
    return copies * records


if __name__ == "__main__":
    main()
