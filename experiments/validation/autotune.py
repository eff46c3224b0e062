"""The best plan found from a recording against Horovod's default and against HOROVOD_AUTOTUNE=1, on real runs in turn.

    python -m experiments.validation.autotune --python ENV/bin/python --trace T --workload bert --out FILE.json [--rounds 2]

Autotuning needs about 230 steps (3 warm-up and 20 samples of 10 steps) before it settles, so its runs are long and only their last
steps count; the others' runs are short. Needs root for a trace of shaped hosts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.trace import Trace
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.horovod import HOROVOD, horovod_environment
from dpro_search.kinds import job_of
from dpro_search.search import run_search
from dpro_search.space.plan import Plan

TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "train.py"
SETTLED_AT, COUNTED = 240, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    trace = Trace.load(options.trace)
    job = job_of(trace)
    with tempfile.TemporaryDirectory() as folder:
        result = run_search(job, trials=500, out=Path(folder) / "run", trace_digest=str(options.trace))
        best = next((ranked.plan for ranked in result.plans if ranked.plan != Plan()), Plan())
        env = horovod_environment(best)
        if best.tensor_groups is not None:
            export_plan(best, Path(folder) / "plan", (HOROVOD,))
            env["DPRO_SEARCH_PLAN"] = str(Path(folder) / "plan")
        settings = {"default": ({}, 30), "autotune": ({"HOROVOD_AUTOTUNE": "1"}, SETTLED_AT + COUNTED), "best plan": (env, 30)}
        medians: dict[str, list[float]] = {name: [] for name in settings}
        for _ in range(options.rounds):
            for name, (variables, steps) in settings.items():
                command = (options.python, str(TRAIN), "--model", options.workload, "--steps", str(steps))
                spec = JobSpec(command=command, cores=trace.meta.cores, env={"OMP_NUM_THREADS": "1", **variables})
                times = TENSORFLOW_HOROVOD.time(spec, rate_bps=trace.meta.rate_bps, shaped=True)
                medians[name].append(float(np.median(times.iteration_us[-COUNTED:])))
                print(f"{options.workload} {name}: {medians[name][-1] / 1e3:.1f} ms", flush=True)
    found = {
        "workload": options.workload,
        "plan": msgspec.to_builtins(best),
        "predicted_us": {"default": result.baseline.iteration_us, "best plan": job.predict(best).iteration_us},
        "gain_certain": result.gain_certain,
        "measured_us": medians,
    }
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
