"""Take the predictions of today as the snapshot: python -m tests.drift.update --reason WHY

Says what moved. Predictions for shared traces that are not here stay as they were.
"""

from __future__ import annotations

import argparse

import msgspec

from dpro_search.collect._files import write_file
from tests.drift.predictions import cases
from tests.drift.snapshot import PATH, Snapshot, drift, read


def main() -> None:
    """Update the snapshot and print what moved."""
    parser = argparse.ArgumentParser(prog="python -m tests.drift.update", description=__doc__)
    parser.add_argument("--reason", required=True, help="why the predictions moved; kept in the snapshot")
    reason = parser.parse_args().reason.strip()
    if not reason:
        parser.error("--reason: say why")
    before = read().predictions
    now: dict[str, dict[str, object]] = {}
    complete = False
    for case in cases():
        complete |= case.shared
        now[case.name] = case.predict()
        for line in drift(before.get(case.name), now[case.name]):
            print(f"{case.name}: {line}")
    kept = {} if complete else {name: found for name, found in before.items() if name.startswith("shared: ")}
    for name in sorted(before.keys() - now.keys() - kept.keys()):
        print(f"{name}: gone")
    raw = msgspec.json.encode(Snapshot(reason=reason, predictions=now | kept))
    write_file(PATH, msgspec.json.format(raw, indent=1) + b"\n")
    print(PATH)


if __name__ == "__main__":
    main()
