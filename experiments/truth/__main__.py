"""Errors of predictors on published runs.

``score FOLDER [--by source,model] [--predictor NAME] [--one-factor N | --calibrated N] [--consistent] [--json]``
scores one predictor;
``compare FOLDER --predictor NAME,NAME,...`` scores several predictors on the rows that all of them support;
``accuracy FOLDER [--predictor NAME]`` prints the errors as the file that the package ships;
``comparable FOLDER`` prints the MFU of groups of runs as the file that the package ships;
``next-plan FOLDER [--json]`` scores which plan to run next, on groups of runs of one job (minutes);
``table FOLDER --out DIR`` writes ``accuracy.html``: every run, with filters, beside two formulas that anybody could use;
``page FOLDER --out DIR [--seeds N]`` writes tables of all predictions and a picture (many minutes).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dpro_search.errors import DproSearchError, InputError
from experiments.truth import peers
from experiments.truth.accuracy import accuracy_toml
from experiments.truth.calibrate import calibrated, one_factor
from experiments.truth.comparable import comparable_toml
from experiments.truth.compare import compared
from experiments.truth.contradictions import contradictions
from experiments.truth.covariances import covariances_toml
from experiments.truth.intervals import intervals
from experiments.truth.next_plan import regrets
from experiments.truth.page import write_page
from experiments.truth.predict import PREDICTORS
from experiments.truth.rows import Row, read
from experiments.truth.score import Predict, Scored, predicted, table
from experiments.truth.table import table_html

_MOST_RUNS = 12  # of a group, in the figures of `next-plan`


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.truth", description=__doc__)
    parser.add_argument("verb", choices=["score", "compare", "accuracy", "comparable", "next-plan", "table", "page"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--by", default="source", help="columns, with commas between them")
    parser.add_argument("--predictor", default="cold", help=", ".join([*PREDICTORS, *peers.PEERS]))
    parser.add_argument(
        "--one-factor", type=int, metavar="SEED", help="fit a factor for each GPU and framework to a fifth of the rows"
    )
    parser.add_argument(
        "--calibrated",
        type=int,
        metavar="SEED",
        help="fit efficiencies for each GPU and framework to a fifth of the rows (minutes)",
    )
    parser.add_argument("--intervals", action="store_true", help="ratios of measured to predicted steps by domain, as JSON")
    parser.add_argument("--consistent", action="store_true", help="leave out rows that contradict themselves or others")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the page or table")
    parser.add_argument("--seeds", type=int, default=3, help="of the page, and of the fifths that `accuracy` learns from")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        rows = list(read(options.folder))
        predictors = {name: _predictor(name) for name in options.predictor.split(",")}
        if options.verb == "compare":
            return _compare(rows, predictors, options)
        (predict,) = predictors.values()
    except DproSearchError as error:
        print(f"experiments.truth: {error}", file=sys.stderr)
        return error.exit_code
    if options.consistent:
        wrong = contradictions(rows)
        kept = [row for place, row in enumerate(rows) if place not in wrong]
        contradicting = Counter((rows[place].values["source"], f"contradicts: {reason}") for place, reason in wrong.items())
        rows = kept
    else:
        contradicting = Counter()
    scored, left_out, seconds = predicted(rows, predict)
    left_out.update(contradicting)
    if options.verb == "page":
        fits = {"one factor": partial(one_factor, scored), "calibrated": partial(calibrated, scored)}
        write_page(options.out, scored, fits, range(options.seeds))
        return 0
    if options.verb == "next-plan":
        print(json.dumps(regrets(scored, _MOST_RUNS), indent=None if options.json else 2))
        return 0
    if options.verb == "table":
        options.out.mkdir(parents=True, exist_ok=True)
        others = {name: predict for name, predict in PREDICTORS.items() if name != options.predictor}
        (options.out / "accuracy.html").write_text(table_html(scored, others))
        return 0
    if options.intervals:
        return _intervals(scored)
    if options.verb == "accuracy":
        print(accuracy_toml(scored), covariances_toml(scored, range(options.seeds)), sep="\n", end="")
        return 0
    if options.verb == "comparable":
        print(comparable_toml(scored), end="")
        return 0
    if options.one_factor is not None:
        scored = one_factor(scored, options.one_factor)
        rows = [found.row for found in scored]
    if options.calibrated is not None:
        scored = calibrated(scored, options.calibrated)
        rows = [found.row for found in scored]
    found = table(scored, rows, [name for name in options.by.split(",") if name])
    for values in (found["all"], *(values for by in options.by.split(",") if by for values in found[by].values())):
        values["seconds_per_row"] = round(seconds, 4)
    reasons = [{"source": source, "reason": reason, "rows": count} for (source, reason), count in left_out.most_common()]
    if options.json:
        print(json.dumps({**found, "unsupported": reasons}, indent=2))
        return 0
    columns = (
        "rows",
        "supported",
        "mape_pct",
        "median_ape_pct",
        "p90_ape_pct",
        "bias_pct",
        "kendall_tau",
        "regret_mean_pct",
        "memory_mape_pct",
        "memory_within_5_pct",
    )
    print(f"{'':36}" + "".join(f"{name:>22}" for name in columns))
    groups = {"all": found["all"], **{name: values for by in options.by.split(",") if by for name, values in found[by].items()}}
    for name, values in groups.items():
        print(f"{name[:35]:36}" + "".join(f"{values.get(column, '-')!s:>22}" for column in columns))
    for reason in reasons[:20]:
        print(f"left out: {reason['rows']:5} of {reason['source']}: {reason['reason']}")
    return 0


def _intervals(scored: Sequence[Scored]) -> int:
    try:
        print(json.dumps(intervals(scored), indent=2))
    except DproSearchError as error:
        print(f"experiments.truth: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _predictor(name: str) -> Predict:
    if name in peers.PEERS:
        return peers.predictor(name)
    if name not in PREDICTORS:
        raise InputError(f"no predictor {name}: choose from {', '.join([*PREDICTORS, *peers.PEERS])}")
    return PREDICTORS[name]


def _compare(rows: list[Row], predictors: dict[str, Predict], options: argparse.Namespace) -> int:
    by = [name for name in options.by.split(",") if name]
    found = compared(rows, predictors, by)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(
        f"{found['rows']} rows that all support: mean and median absolute error, median error (%), order (Kendall tau), memory (%)"
    )
    columns = ("mape_pct", "median_ape_pct", "bias_pct", "kendall_tau", "memory_median_ape_pct")
    parts = [("all", "all"), *((column, value) for column in by for value in found["predictors"][next(iter(predictors))][column])]
    for column, value in parts:
        for name, figures in found["predictors"].items():
            one = figures["all"] if column == "all" else figures[column][value]
            numbers = "".join(f"{one.get(key, '-')!s:>12}" for key in columns)
            print(f"{value[:24]:26}{one['rows']:6} {name:20}{numbers}")
    for name, alone in found["alone"].items():
        print(f"{name}: {alone['supported']} rows alone, {alone['seconds_per_row'] * 1e3:.1f} ms each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
