"""What another recording of the same job might have told of its costs: `CostSpread`, and draws from it, `CostFactors`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats


@dataclass(frozen=True, kw_only=True)
class CostFactors:
    """Factors on the costs that a recording told.

    Attributes
    ----------
    compute
        On the core time of each worker's operators, [workers].
    message
        On the core time that processes need for what they send and receive.
    server
        On the core time of what servers do with it.
    """

    compute: Floats
    message: float
    server: float


@dataclass(frozen=True, kw_only=True)
class CostSpread:
    """By how much costs differ between recordings of one job: standard deviations of their logarithms, independent of each other.

    Attributes
    ----------
    common, worker
        Core time of operators: what all workers have in common, and each worker's own.
    message, server
        As in `CostFactors`.
    """

    common: float
    worker: float
    message: float
    server: float

    def drawn(self, workers: int, samples: int, seed: int) -> list[CostFactors]:
        """So many draws; those of one seed are the same for every plan.

        Every second draw is the one before it with the opposite sign (antithetic), so that the mean of what depends on costs
        linearly is that of the costs as recorded, up to the second order.
        """
        rng = np.random.default_rng(seed)
        normal = np.repeat(rng.standard_normal((-(-samples // 2), workers + 3)), 2, axis=0)[:samples]
        normal[1::2] *= -1
        return [
            CostFactors(
                compute=np.exp(self.common * row[0] + self.worker * row[3:]),
                message=float(np.exp(self.message * row[1])),
                server=float(np.exp(self.server * row[2])),
            )
            for row in normal
        ]
