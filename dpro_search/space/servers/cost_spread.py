"""How costs vary between recordings of one job, and between its iterations: `CostSpread`, and draws from it, `CostFactors`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats


@dataclass(frozen=True, kw_only=True)
class CostFactors:
    """Factors on the costs that a recording gave."""

    compute: Floats  # On the core time of each worker's operators, [workers].
    message: float  # On the core time that processes need for what they send and receive.
    server: float  # On the core time of what servers do with it.
    step: Floats  # On the core time of each worker's operators in each iteration, beside `compute`, [iterations, workers].


@dataclass(frozen=True, kw_only=True)
class CostSpread:
    """The spread of costs: standard deviations of their logarithms, independent of each other."""

    # common, worker: Core time of operators, between recordings of one job: what all workers have in common, and each worker's own.
    common: float
    worker: float
    # message, server: As in `CostFactors`, between recordings.
    message: float
    server: float
    step: float  # Core time of a worker's operators, between iterations of one recording.

    def drawn(self, workers: int, iterations: int, samples: int, seed: int) -> list[CostFactors]:
        """So many draws; those of one seed are the same for every plan.

        Every second draw is the one before it with the opposite sign (antithetic), so that the mean of what depends on costs
        linearly is that of the costs as recorded, up to the second order.
        """
        rng = np.random.default_rng(seed)
        each = 3 + workers + iterations * workers
        normal = np.repeat(rng.standard_normal((-(-samples // 2), each)), 2, axis=0)[:samples]
        normal[1::2] *= -1
        return [
            CostFactors(
                compute=np.exp(self.common * row[0] + self.worker * row[3 : 3 + workers]),
                message=float(np.exp(self.message * row[1])),
                server=float(np.exp(self.server * row[2])),
                step=np.exp(self.step * row[3 + workers :].reshape(iterations, workers)),
            )
            for row in normal
        ]
