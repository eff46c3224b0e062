"""A search in a process of its own: python search_process.py RUN TRIALS [INTERRUPT_AT]. Prints why it stopped.

With INTERRUPT_AT it sends itself a real SIGINT, as Ctrl-C does, while that trial is being evaluated.
"""

import os
import signal
import sys
from pathlib import Path

from bus_objective import BusObjective, tensors_of

from dpro_search.errors import DproSearchError
from dpro_search.search import run_search
from dpro_search.space.plan import Plan, Prediction

run, trials, *interrupt_at = sys.argv[1:]


class Interrupted(BusObjective):
    def predict(self, plan: Plan) -> Prediction:
        evaluated.append(plan)
        if interrupt_at and len(evaluated) == int(interrupt_at[0]):
            os.kill(os.getpid(), signal.SIGINT)
        return super().predict(plan)


evaluated: list[Plan] = []
try:
    result = run_search(
        Interrupted(tensors_of([40_000] * 8)), trials=int(trials), sampler="mcmc", seed=5, out=Path(run), trace_digest="bus"
    )
except DproSearchError as error:
    sys.exit(str(error))
print(result.stopped, result.trials)
