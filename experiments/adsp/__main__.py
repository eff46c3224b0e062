"""The paper's experiments, and a search for the best scheme:

    python -m experiments.adsp all FOLDER [--seeds 3]                          # all that follows but the search, and its tables
    python -m experiments.adsp measure --out RUNS.jsonl [--only convergence] [--seeds 3]   # real, paced processes; resumable
    python -m experiments.adsp emulate --out RUNS.jsonl [--only delay]         # real training in simulated time
    python -m experiments.adsp table RUNS.jsonl
    python -m experiments.adsp kills --out KILLS.jsonl [--kills 30]            # SIGKILL of random workers while ADSP trains
    python -m experiments.adsp search RUNS.jsonl --workload digits-mlp --speeds 1:1:2:3 [--out PLAN.json]

Needs PyTorch, Ray and scikit-learn (`scripts/make_env.sh synchronisation`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dpro_search.errors import DproSearchError, InputError
from experiments.adsp.cases import COMMIT_S, EXPERIMENTS, SPEEDS, STEP_S, Case, cases
from experiments.adsp.journal import Journal


def main() -> None:
    arguments = _parser().parse_args()
    try:
        arguments.call(arguments)
    except DproSearchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _measure(arguments: argparse.Namespace) -> None:
    from experiments.adsp.measured import Machine

    journal = Journal(arguments.out)
    todo, done = _chosen(arguments, journal), 0
    for cpus in dict.fromkeys(case.cpus for case in todo):
        alike = [case for case in todo if case.cpus == cpus]
        with Machine(max(len(case.paces) for case in alike), cpus) as machine:
            for case in alike:
                record, done = machine.train(case), done + 1
                journal.add(case, **record)
                _progress(done, len(todo), case, record["time_s"], f"{100 * record['late_share']:.1f} % late steps")
    _table(arguments)


def _emulate(arguments: argparse.Namespace) -> None:
    from experiments.adsp.emulated import record_of

    journal = Journal(arguments.out)
    todo = [case for case in _chosen(arguments, journal) if not case.quotas]
    for number, case in enumerate(todo, 1):
        record = record_of(case)
        journal.add(case, **record)
        _progress(number, len(todo), case, record["time_s"], "simulated")
    _table(arguments)


def _table(arguments: argparse.Namespace) -> None:
    from experiments.adsp.tables import tables

    for line in tables(Journal(arguments.out)):
        print(line)


def _kills(arguments: argparse.Namespace) -> None:
    from experiments.adsp.kills import kills

    for line in kills(arguments.out, arguments.kills):
        print(line, flush=True)


def _all(arguments: argparse.Namespace) -> None:
    """Real runs on an idle machine first; then real training in simulated time, which may run beside other work."""
    measured, emulated = arguments.folder / "measured.jsonl", arguments.folder / "simulated.jsonl"
    common: dict[str, object] = {"seeds": arguments.seeds, "workload": []}
    _measure(argparse.Namespace(out=measured, only=["calibration", "convergence"], **common))
    _kills(argparse.Namespace(out=arguments.folder / "kills.jsonl", kills=30))
    _measure(argparse.Namespace(out=measured, only=["heterogeneity", "picked"], **{**common, "seeds": min(arguments.seeds, 3)}))
    sweeps = ["workers", "delay", "batch", "changing", "search"]
    _measure(argparse.Namespace(out=measured, only=sweeps, **{**common, "seeds": 1}))
    if not arguments.measured_only:
        _emulate(argparse.Namespace(out=emulated, only=[], **common))


def _search(arguments: argparse.Namespace) -> None:
    from dpro_search.runtime.schemes import parse_paces
    from dpro_search.space.plan import Plan
    from experiments.adsp.predicted import predictions
    from experiments.adsp.workloads import WORKLOADS

    if arguments.workload not in WORKLOADS:
        raise InputError(f"--workload {arguments.workload}: known are {', '.join(WORKLOADS)}")
    paces = parse_paces(arguments.speeds, step_s=arguments.step_s, commit_s=arguments.commit_s)
    found = predictions(Journal(arguments.journal), arguments.workload, paces)
    plan = Plan.of(synchronisation=str(found[0].scheme))
    if arguments.out:
        arguments.out.write_bytes(plan.to_json())
    if arguments.json:
        rows = [
            {"synchronisation": str(e.scheme), "time_s": e.time_s, "interval_s": e.interval_s, "commits": e.commits} for e in found
        ]
        print(json.dumps({"schemes": rows, "plan": plan.settings}))
        return
    for each in found:
        time = (
            "not reached"
            if each.time_s is None
            else f"{each.time_s:6.1f} s  ({each.interval_s[0]:.1f} to {each.interval_s[1]:.1f})"
        )
        print(f"{each.scheme!s:44} {time}  {each.commits} commits, waiting {100 * each.waiting_share:.1f} %")


def _chosen(arguments: argparse.Namespace, journal: Journal) -> list[Case]:
    unknown = [name for name in arguments.only if name not in EXPERIMENTS]
    if unknown:
        raise InputError(f"--only {unknown[0]}: known are {', '.join(EXPERIMENTS)}")
    found = cases(arguments.only or EXPERIMENTS)
    found = [case for case in found if case.seed < arguments.seeds or case.experiment == "calibration"]
    return [case for case in found if case not in journal and case.workload in (arguments.workload or [case.workload])]


def _progress(number: int, count: int, case: Case, time_s: float | None, more: str) -> None:
    time = "target not reached" if time_s is None else f"{time_s:.1f} s"
    line = f"[{number}/{count}] {case.experiment} {case.varied} {case.workload} {case.scheme} seed {case.seed}: {time}, {more}"
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, call in (("measure", _measure), ("emulate", _emulate)):
        verb = verbs.add_parser(name)
        verb.set_defaults(call=call)
        verb.add_argument("--out", type=Path, required=True)
        verb.add_argument("--only", action="append", default=[], metavar="EXPERIMENT")
        verb.add_argument("--workload", action="append", default=[])
        verb.add_argument("--seeds", type=int, default=5)
    table = verbs.add_parser("table")
    table.set_defaults(call=_table)
    table.add_argument("out", type=Path)
    kill = verbs.add_parser("kills")
    kill.set_defaults(call=_kills)
    kill.add_argument("--out", type=Path, required=True)
    kill.add_argument("--kills", type=int, default=30)
    whole = verbs.add_parser("all")
    whole.set_defaults(call=_all)
    whole.add_argument("folder", type=Path)
    whole.add_argument("--seeds", type=int, default=5)
    whole.add_argument("--measured-only", action="store_true")
    search = verbs.add_parser("search")
    search.set_defaults(call=_search)
    search.add_argument("journal", type=Path)
    search.add_argument("--workload", required=True)
    search.add_argument("--speeds", default=SPEEDS)
    search.add_argument("--step-s", type=float, default=STEP_S)
    search.add_argument("--commit-s", type=float, default=COMMIT_S)
    search.add_argument("--out", type=Path)
    search.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
