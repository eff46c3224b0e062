"""All-reduces chosen by size, beside those of Open MPI and MPICH: measured on shaped hosts, in the same job, in turn.

    python -m experiments.allreduce measure TABLE [--ranks 2,4,8] [--rates 500mbit,2gbit,unlimited] [--ranks-per-host 1]
                                              [--mpi open-mpi|mpich]
    python -m experiments.allreduce table TABLE [TABLE ...]
    python -m experiments.allreduce checked RESULT TABLE [TABLE ...] [--ranks ...] [--rates ...] [--mpi ...]
    python -m experiments.allreduce checked-table RESULT
    python -m experiments.allreduce check-cost TABLE [TABLE ...] [--ranks ...] [--rates ...] [--mpi ...]

`measure` needs root, Open MPI or MPICH, mpi4py, and an idle machine; it goes on where it stopped. `table` prints, for each number
of ranks and rate, what the chosen all-reduces take against the MPI library's default and against its best fixed algorithm, and what
the choice of the cost model loses. The choice for a size is made from the other sizes only. `checked` measures a session of the
choice from earlier tables with the check at run time; each call is a session. `check-cost` prints what the check costs in the first
200 steps of three networks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpro_search.measure.all_reduces import CommProgress, CommRequest, collect_communication
from dpro_search.quantities import parse_rate_bps
from experiments.allreduce import checked
from experiments.allreduce.tables import lines

_BACKENDS = {"open-mpi": "mpi4py", "mpich": "mpi4py-mpich"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    measure = actions.add_parser("measure")
    measure.add_argument("table", type=Path)
    measure.add_argument("--ranks-per-host", type=int, default=1)
    checked_parser = actions.add_parser("checked")
    checked_parser.add_argument("result", type=Path)
    cost_parser = actions.add_parser("check-cost")
    cost_parser.add_argument("--compute", type=float, default=0.1, help="seconds of a step without sums")
    for parser_of_places in (measure, checked_parser, cost_parser):
        parser_of_places.add_argument("--ranks", default="2,4,8")
        parser_of_places.add_argument("--rates", default="500mbit,2gbit,unlimited")
        parser_of_places.add_argument("--mpi", choices=_BACKENDS, default="open-mpi")
        parser_of_places.add_argument("--rounds", type=int, default=3)
        parser_of_places.add_argument(
            "--longest", type=float, default=0.6, help="seconds of an all-reduce; slower ones are left out"
        )
    for parser_of_tables in (checked_parser, cost_parser, actions.add_parser("table")):
        parser_of_tables.add_argument("tables", type=Path, nargs="+")
    actions.add_parser("checked-table").add_argument("result", type=Path)
    options = parser.parse_args()
    if options.action == "measure":
        _measure(options)
    elif options.action == "checked":
        checked.measure(options.tables, _places(options), options.result, rounds=options.rounds, longest_s=options.longest)
    elif options.action == "checked-table":
        print("\n".join(checked.lines(options.result)))
    elif options.action == "check-cost":
        for line in checked.cost(options.tables, _places(options), compute_s=options.compute):
            print(line, flush=True)
    else:
        print("\n".join(lines(options.tables)))


def _places(options: argparse.Namespace) -> list[checked.Place]:
    return [
        checked.Place(library=_BACKENDS[options.mpi], ranks=ranks, rate_bps=rate_bps)
        for ranks in _ranks(options)
        for rate_bps in _rates_bps(options)
    ]


def _ranks(options: argparse.Namespace) -> tuple[int, ...]:
    return tuple(map(int, options.ranks.split(",")))


def _rates_bps(options: argparse.Namespace) -> tuple[float | None, ...]:
    return tuple(None if rate == "unlimited" else parse_rate_bps(rate) for rate in options.rates.split(","))


def _measure(options: argparse.Namespace) -> None:
    request = CommRequest(
        backends=(_BACKENDS[options.mpi],),
        ranks=_ranks(options),
        rates_bps=_rates_bps(options),
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
