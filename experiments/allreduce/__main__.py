"""All-reduces chosen by size, beside those of Open MPI and MPICH: measured on shaped hosts, in the same job, in turn.

    python -m experiments.allreduce measure TABLE [--ranks 2,4,8] [--rates 500mbit,2gbit,unlimited] [--ranks-per-host 1]
                                              [--mpi open-mpi|mpich]
    python -m experiments.allreduce table TABLE [TABLE ...]
    python -m experiments.allreduce additions
    python -m experiments.allreduce characterise DIR [--schemes ddp-gloo,ddp-hook,...] [--workers 2,4,8]
    python -m experiments.allreduce characterised DIR

`measure` needs root, Open MPI or MPICH, mpi4py, and an idle machine; it goes on where it stopped. `table` prints, for each number
of ranks and rate, what the chosen all-reduces take against the MPI library's default and against its best fixed algorithm, and what
the choice of the cost model loses. The choice for a size is made from the other sizes only. `additions` times the adding alone,
NumPy's, compiled by LLVM, MPI's own, torch's, and what the registry of buffers saves.

`characterise` runs how frameworks exchange gradients, case by case, into DIR/characterised.jsonl (root, an idle machine, the
environments of scripts/make_env.sh; resumable); `characterised` prints its tables, measured beside predicted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpro_search.measure.all_reduces import CommProgress, CommRequest, collect_communication
from dpro_search.quantities import parse_rate_bps
from experiments.allreduce.cases import WORKERS
from experiments.allreduce.schemes import SCHEMES
from experiments.allreduce.tables import lines

_BACKENDS = {"open-mpi": "mpi4py", "mpich": "mpi4py-mpich"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    measure = actions.add_parser("measure")
    measure.add_argument("table", type=Path)
    measure.add_argument("--ranks", default="2,4,8")
    measure.add_argument("--ranks-per-host", type=int, default=1)
    measure.add_argument("--rates", default="500mbit,2gbit,unlimited")
    measure.add_argument("--mpi", choices=_BACKENDS, default="open-mpi")
    measure.add_argument("--rounds", type=int, default=3)
    measure.add_argument("--longest", type=float, default=0.6, help="seconds of an all-reduce; slower ones are left out")
    table = actions.add_parser("table")
    table.add_argument("tables", type=Path, nargs="+")
    actions.add_parser("additions")
    on_device = actions.add_parser("on-device", help="a GPU that ranks share; with --show: tables of these files")
    on_device.add_argument("out", type=Path, nargs="+")
    on_device.add_argument("--ranks", default="2,4")
    on_device.add_argument("--seconds", type=float, default=180.0, help="that all may take")
    on_device.add_argument("--show", action="store_true")
    characterise = actions.add_parser("characterise")
    characterise.add_argument("folder", type=Path)
    characterise.add_argument("--schemes", default=",".join(name for name in SCHEMES if name != "mxnet-byteps"))
    characterise.add_argument("--workers", default=",".join(map(str, WORKERS)))
    actions.add_parser("characterised").add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.action == "measure":
        _measure(options)
    elif options.action == "table":
        print("\n".join(lines(options.tables)))
    elif options.action == "on-device":
        _on_device(options)
    elif options.action == "characterise":
        _characterise(options)
    elif options.action == "characterised":
        from experiments.allreduce import characterised

        print("\n".join(characterised.lines(options.folder)))
    else:
        from experiments.allreduce import additions

        print("\n".join(additions.lines()))


def _measure(options: argparse.Namespace) -> None:
    request = CommRequest(
        backends=(_BACKENDS[options.mpi],),
        ranks=tuple(map(int, options.ranks.split(","))),
        rates_bps=tuple(None if rate == "unlimited" else parse_rate_bps(rate) for rate in options.rates.split(",")),
        sizes_bytes=tuple(4**power for power in range(2, 14)),  # 16 B to 64 MiB
        rounds=options.rounds,
        longest_s=options.longest,
        ranks_per_host=options.ranks_per_host,
    )

    def show(progress: CommProgress) -> None:
        print(f"\r{progress.rows} all-reduces, {progress.new} calls ({progress.now})", end="", file=sys.stderr, flush=True)

    progress = collect_communication(request, options.table, show)
    print(f"\n{options.table}: {progress.rows} all-reduces; {'complete' if progress.complete else 'not complete: run it again'}")
    for job, reason in progress.failed_jobs.items():
        print(f"{job}: {reason}", file=sys.stderr)


def _on_device(options: argparse.Namespace) -> None:
    from experiments.allreduce import on_device

    if not options.show:
        ranks = list(map(int, options.ranks.split(",")))
        on_device.measure(options.out[0], ranks, options.seconds)
        options.out = [options.out[0].with_name(f"{options.out[0].name}-{count}.json") for count in ranks]
    print("\n".join(on_device.lines([file for file in options.out if file.exists()])))


def _characterise(options: argparse.Namespace) -> None:
    from experiments.allreduce.characterise import characterise, show_on_stderr

    names = options.schemes.split(",")
    if unknown := [name for name in names if name not in SCHEMES]:
        raise SystemExit(f"--schemes {unknown[0]}: known are {', '.join(SCHEMES)}")
    characterise(options.folder, names, [int(text) for text in options.workers.split(",")], show_on_stderr)


if __name__ == "__main__":
    main()
