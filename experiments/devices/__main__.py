"""Scores predictors of op latencies on devices and models that were left out, and fits what the package ships: trees and probes.

    python -m experiments.devices score FOLDER [--aiconfigurator DIR] [--seeds 0,1,2,3,4] [--cache FILE] [--json]
    python -m experiments.devices ship FOLDER [--aiconfigurator DIR]
    python -m experiments.devices probes FOLDER [--aiconfigurator DIR]
    python -m experiments.devices samples TABLE --specs DEVICE --out FILE.toml [--budget 100]

FOLDER has neusight/, sailor/, deepbench/, vidur/ or tuned/ (public measurements). aiconfigurator-core is taken where it is
installed, or from the folder that it was unpacked to. A seed takes about fifteen minutes on an idle core; with --cache FILE parts
and seeds that are in the file are not computed again.

TABLE is a table of layers that were measured on DEVICE (`costmodel.devices.profile_tables`): `samples` writes a device file with as
many of its ops as --budget says, chosen by what they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dpro_search.errors import DproSearchError
from experiments.devices.report import shown, summary
from experiments.devices.score import ON_REQUEST, ONCE, PARTS, scored


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.devices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["score", "ship", "probes", "samples"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--aiconfigurator", type=Path, metavar="DIR")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="with commas between them")
    parser.add_argument(
        "--parts",
        help=f"what to score of each seed: {', '.join(PARTS)} (default: all but {', '.join(ON_REQUEST)}; "
        f"{', '.join(ONCE)} for the first seed only)",
    )
    parser.add_argument("--cache", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--specs", metavar="DEVICE", help="of samples: the bundled device that the table is of")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of samples: the device file to write")
    parser.add_argument("--budget", type=int, default=100, metavar="N", help="of samples: number of ops (default: 100)")
    options = parser.parse_args()
    if options.verb != "score":
        from experiments.devices.ship import device_of_table, probes_toml, ship

        try:
            if options.verb == "samples":
                print(device_of_table(options.folder, options.specs, options.out, options.budget))
                return 0
            print((ship if options.verb == "ship" else probes_toml)(options.folder, options.aiconfigurator))
        except DproSearchError as error:
            return _failed(error)
        return 0
    return _score(options)


def _score(options: argparse.Namespace) -> int:
    """Prints one JSON object with --json, whatever the folder holds: ``errors`` has what failed, ``left_out`` what is not used."""
    known: dict[str, Any] = json.loads(options.cache.read_text()) if options.cache and options.cache.is_file() else {}
    skipped: list[str] = []
    failed: list[str] = []
    for place, seed in enumerate(options.seeds.split(",")):
        usual = [part for part in PARTS if part not in ON_REQUEST and (place == 0 or part not in ONCE)]
        for part in options.parts.split(",") if options.parts else usual:
            if f"{part}/{seed}" in known:
                continue
            try:
                known[f"{part}/{seed}"] = scored(options.folder, options.aiconfigurator, part, int(seed), skipped)
            except (DproSearchError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                said = str(error) if isinstance(error, DproSearchError) else f"{part}: {type(error).__name__}: {error}"
                failed.append(" ".join(said.split())[:300])
                continue
            if options.cache:
                options.cache.write_text(json.dumps(known))
    wanted = {key: rows for key, rows in known.items() if key.split("/")[1] in options.seeds.split(",")}
    found = summary(wanted)
    failed, skipped = sorted(set(failed)), sorted(set(skipped))
    if options.json:
        print(json.dumps({**found, "left_out": skipped, "errors": failed}, indent=2))
    else:
        print(shown(found))
    for reason in skipped:
        print(f"left out: {reason}", file=sys.stderr)
    for reason in failed:
        print(f"experiments.devices: {reason}", file=sys.stderr)
    return 2 if failed and not any(found.values()) else 0


def _failed(error: DproSearchError) -> int:
    print(f"experiments.devices: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
