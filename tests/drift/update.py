"""Take the predictions and outputs of today as the snapshot: python -m tests.drift.update --reason WHY

Says what moved. Predictions for shared traces that are not here stay as they were.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from tests.drift.commands import COMMANDS, output_of
from tests.drift.jobs import JOBS, SHARED
from tests.drift.predictions import predictions_of
from tests.drift.snapshot import Snapshot, drift, path_of, read, write


def main() -> None:
    """Update the snapshots and print what moved."""
    parser = argparse.ArgumentParser(prog="python -m tests.drift.update", description=__doc__)
    parser.add_argument("--reason", required=True, help="why the predictions moved; kept in the snapshot")
    reason = parser.parse_args().reason.strip()
    if not reason:
        parser.error("--reason: say why")
    present = [name for name, job in JOBS.items() if not job.is_shared or SHARED.is_dir()]
    _update("predictions", JOBS, present, lambda name: predictions_of(JOBS[name]), reason)
    _update("commands", COMMANDS, COMMANDS, output_of, reason)


def _update(
    snapshot: str, known: Iterable[str], present: Iterable[str], value: Callable[[str], dict[str, Any]], reason: str
) -> None:
    """Write one snapshot; entries that are known but not present here stay as they were."""
    before = read(snapshot)
    now = {name: before.values[name] for name in known if name in before.values}
    moved = [f"{name}: gone" for name in sorted(before.values.keys() - now.keys())]
    for name in present:
        now[name] = value(name)
        moved += [f"{name}: {line}" for line in drift(before.values.get(name), now[name])]
    for line in moved:
        print(line)
    if moved:
        write(snapshot, Snapshot(reason=reason, values=now))
    print(f"{path_of(snapshot)}: {len(moved)} differences")


if __name__ == "__main__":
    main()
