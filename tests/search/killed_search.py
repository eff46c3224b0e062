"""A search that can be killed: python killed_search.py RUN TRIALS WORKERS [STORAGE]. Prints every trial's number.

Each evaluation takes some milliseconds of work. With KILL_WORKER=N in the environment a worker kills itself with SIGKILL at its
plan N; with KILL_SEARCH=N the search is killed after its trial N. ENGINE: where the workers run.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
from bus_objective import BusObjective, tensors_of

from dpro_search.errors import DproSearchError
from dpro_search.search import Trial, run_search
from dpro_search.space.plan import Plan, Prediction

run, trials, workers, *storage = sys.argv[1:]
search_pid = os.getpid()


class Slow(BusObjective):
    """Some work for each evaluation; equal plans get equal predictions."""

    def predict(self, plan: Plan) -> Prediction:
        evaluated.append(plan)
        if len(evaluated) == int(os.environ.get("KILL_WORKER", "-1")) and os.getpid() != search_pid:
            os.kill(os.getpid(), signal.SIGKILL)
        np.linalg.svd(np.random.default_rng(0).random((60, 60)))
        return super().predict(plan)


def after(trial: Trial) -> None:
    print(trial.number, flush=True)
    if trial.number == int(os.environ.get("KILL_SEARCH", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


evaluated: list[Plan] = []
try:
    run_search(
        Slow(tensors_of([40_000] * 8)),
        trials=int(trials),
        sampler=os.environ.get("SAMPLER", "mcmc"),
        seed=5,
        out=Path(run),
        trace_digest="bus",
        workers=int(workers),
        engine=os.environ.get("ENGINE", "local"),
        storage=storage[0] if storage else None,
        on_trial=after,
    )
except DproSearchError as error:
    sys.exit(str(error))
