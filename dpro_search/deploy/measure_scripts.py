"""Scripts that measure a plan on a cluster: baseline and plan run in turn, then the commands that give their times back.

``measure_torchrun.sh`` starts the ranks of one host; ``measure_slurm.sh`` starts it on all hosts of an allocation. Facts of a site
(partition, account, container) and of a training (its script and arguments) are not known here: they are marked to be filled in.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpro_search.deploy.parts.part import Part, ShortRun, Target
from dpro_search.errors import InputError
from dpro_search.space.plan import Prediction

BASELINE = "baseline"  # the folder of the setting without a plan, and its name in logs
ROUNDS, STEPS = 2, 20
_START_S = 180  # allowed for the start of a run in the time limit that is suggested


@dataclass(frozen=True, kw_only=True)
class PlanToMeasure:
    """The plan of a run folder that is measured: the folder, and the plan's number in it."""

    run: Path
    number: int


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """One of the settings that run in turn."""

    name: str
    number: int
    folder: str  # in the shell
    environment: tuple[str, ...]  # files with variables
    run: ShortRun


def measure_files(
    measured: PlanToMeasure,
    planned: Mapping[Target, Part],
    baseline: Mapping[Target, Part] | InputError,
    expected: tuple[Prediction, Prediction] | None,
) -> dict[str, bytes]:
    """The scripts by name; empty: the targets do not say how their ranks are started.

    Parameters
    ----------
    baseline
        The setting without a plan for the same targets, or why they cannot express it: then the plan runs alone.
    expected
        Predictions of the plan and of the baseline, for the time limit that is suggested.
    """
    variants = [] if isinstance(baseline, InputError) else [_variant(BASELINE, 0, f'"$here/{BASELINE}"', baseline)]
    variants.append(_variant("plan", measured.number, '"$here"', planned))
    known = [variant for variant in variants if variant is not None]
    if len(known) < len(variants) or not known:
        return {}
    alone = f"\n# The baseline does not run: {baseline}." if isinstance(baseline, InputError) else ""
    return {
        "measure_torchrun.sh": _torchrun_script(measured, known, alone).encode(),
        "measure_slurm.sh": _slurm_script(measured, known, expected).encode(),
    }


def _variant(name: str, number: int, folder: str, parts: Mapping[Target, Part]) -> _Variant | None:
    runs = [part.short_run for part in parts.values() if part.short_run is not None]
    if len(runs) != 1:
        return None
    environment = tuple(f"{target}.env" for target, part in parts.items() if part.env or target.always_env)
    return _Variant(name=name, number=number, folder=folder, environment=environment, run=runs[0])


def _torchrun_script(measured: PlanToMeasure, variants: Sequence[_Variant], alone: str) -> str:
    run = variants[-1].run
    names = [variant.name for variant in variants]
    what = "baseline and plan in turn, ROUNDS times each" if len(names) > 1 else "the plan ROUNDS times"
    where = "on the host" if run.hosts == 1 else f"on each of the {run.hosts} hosts at the same time, with HEAD=NAME_OF_THE_FIRST"
    head = "" if run.hosts == 1 else ': "${HEAD:?is not set: it is the name or address of the first host}"\n'
    numbers = "\n".join(f"    {variant.name}) number={variant.number} ;;" for variant in variants)
    time = '--log $(printf %q "$log")' if run.logs_steps else "--step-time TIME  # from $log"
    script = f"SCRIPT=${{SCRIPT:-{run.script}}}\n" if run.script else ""
    needs = ("its script, and " if script else "") + "arguments for model, data and learning rate"
    ends = f"The number of steps is set by {run.short.split()[0]}." if run.short else "It ends after $STEPS steps and logs each."
    return f"""\
#!/usr/bin/env bash
# Runs {what}, and prints the commands that give the times to dpro-search.
# Start it {where}: bash measure_torchrun.sh{alone}
#
# Variables: ROUNDS ({ROUNDS}), STEPS of a run ({STEPS}), LOGS (a folder), TORCHRUN, and MEASURE_WITH (words before each run).
set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
run={shlex.quote(os.path.realpath(measured.run))}
ROUNDS=${{ROUNDS:-{ROUNDS}}} LOGS=${{LOGS:-$here/logs}} TORCHRUN=${{TORCHRUN:-torchrun}}
export STEPS=${{STEPS:-{STEPS}}}
{head}
# FILL IN what the training needs beside the plan: {needs}.
# {ends}
{script}SCRIPT_ARGUMENTS=()

{"".join(_function(variant) for variant in variants)}
if [ "${{1:-}}" = once ]; then  # NAME ROUND: the ranks of this host in one run
  export PYTHONUNBUFFERED=1
  round=$3
  "run_$2"
  exit
fi
names=({" ".join(names)})
mkdir -p -- "$LOGS"
for round in $(seq "$ROUNDS"); do
  for name in "${{names[@]}}"; do
    log=$LOGS/$name-$round.log
    echo "$name, run $round of $ROUNDS: $log"
    # shellcheck disable=SC2086  # words, not a word
    if ! ${{MEASURE_WITH:-}} bash "$here/measure_torchrun.sh" once "$name" "$round" > "$log" 2>&1; then
      echo "$name failed; the end of its log:" >&2
      tail -n 60 -- "$log" >&2
      exit 1
    fi
  done
done
echo "Give the times to dpro-search with:"
for log in "$LOGS"/*.log; do
  name=$(basename -- "$log")
  case ${{name%-*}} in
{numbers}
    *) continue ;;
  esac
  echo "dpro-search measured $(printf %q "$run") --plan $number {time}"
done
"""


def _function(variant: _Variant) -> str:
    """The lines that start one setting's ranks on this host."""
    run = variant.run
    lines = [f"local FOLDER={variant.folder}"]
    if variant.environment:
        lines += ["set -a", *(line for name in variant.environment for line in _sourced(name)), "set +a"]
    lines += ['export PYTHONPATH="$FOLDER${PYTHONPATH:+:$PYTHONPATH}"', *run.prepare]
    if run.launcher is not None:
        start = run.launcher
    elif run.hosts == 1:
        start = f'"$TORCHRUN" --standalone --nproc-per-node {run.ranks_per_host}'
    else:
        rendezvous = f'--rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "{variant.name}-$round"'
        start = f'"$TORCHRUN" --nnodes {run.hosts} --nproc-per-node {run.ranks_per_host} {rendezvous}'
    words = " ".join(filter(None, (run.program, run.short)))
    lines.append(f'{start} \\\n    {words} ${{SCRIPT_ARGUMENTS[@]+"${{SCRIPT_ARGUMENTS[@]}}"}}')
    return f"run_{variant.name}() {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def _sourced(name: str) -> tuple[str, str]:
    return "# shellcheck source=/dev/null", f'. "$FOLDER/{name}"'


def _slurm_script(measured: PlanToMeasure, variants: Sequence[_Variant], expected: tuple[Prediction, Prediction] | None) -> str:
    run = variants[-1].run
    gpus = f"#SBATCH --gpus-per-node={run.ranks_per_host}\n" if run.gpus else ""
    return f"""\
#!/usr/bin/env bash
#SBATCH --job-name=measure-plan-{measured.number}
#SBATCH --nodes={run.hosts}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --output=measure-%j.out
# FILL IN what your site asks for, and remove one # of each line that you use:
##SBATCH --partition=FILL_IN
##SBATCH --account=FILL_IN
##SBATCH --time=FILL_IN
{_limit(variants, expected)}#
# Submit it from its folder: sbatch measure_slurm.sh. A task on each host runs measure_torchrun.sh, in which the training is
# filled in. The log of a run has the output of all hosts.
set -euo pipefail
here=${{SLURM_SUBMIT_DIR:?is not set: submit this file with sbatch}}
if [ ! -f "$here/measure_torchrun.sh" ]; then
  echo "measure_torchrun.sh is not in $here: submit from the folder of this file" >&2
  exit 1
fi
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# FILL IN further words for srun, like those that start your site's container.
MEASURE_WITH="srun --kill-on-bad-exit=1"
export HEAD MEASURE_WITH
bash "$here/measure_torchrun.sh"
"""


def _limit(variants: Sequence[_Variant], expected: tuple[Prediction, Prediction] | None) -> str:
    """A note on how long the runs take by prediction; empty: nothing was predicted."""
    if expected is None:
        return ""
    planned, baseline = expected
    each_s = [STEPS * one.iteration_us / 1e6 for one in ((baseline, planned) if len(variants) > 1 else (planned,))]
    minutes = math.ceil(ROUNDS * (sum(each_s) + _START_S * len(each_s)) / 60)
    return f"# (The runs take about {minutes} minutes by prediction, with {_START_S // 60} for the start of each.)\n"
