"""`PlanBeliefs`: step times of plans of one job after some of them were run, and which one to run next.

The logarithm of a measured step is that of its prediction plus an error. The errors of plans have a joint normal distribution:
efficiencies of devices, links and hosts that are other than predicted move all plans, each by its slopes; the rest belongs to one
plan alone. So the run of one plan says something about the others.

The plan to run next is the one that would be fastest if each were one standard deviation faster than is believed (a lower
confidence bound; Srinivas et al. 2010, "Gaussian process optimization in the bandit setting"). A further run is worth what it
is expected to make the plan better that is chosen in the end: the knowledge gradient (Frazier, Powell and Dayanik 2009, "The
knowledge-gradient policy for correlated normal beliefs", INFORMS Journal on Computing 21).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.residual import Residual

_NODES = 24  # Nodes of the quadrature over the results that a run may have.


@dataclass(frozen=True, kw_only=True)
class PlanBeliefs:
    """Predictions of plans and the joint distribution of their errors.

    Attributes
    ----------
    logs
        Logarithm of each plan's predicted step time, [plans].
    covariance
        Covariance of the errors of `logs`, [plans, plans].
    noise
        Standard deviation of the logarithm of a measured step.
    """

    logs: Floats
    covariance: Floats
    noise: float

    def after(self, measured: Mapping[int, float]) -> PlanBeliefs:
        """The beliefs after some plans were run.

        Parameters
        ----------
        measured
            Logarithm of the measured step time by the number of the plan.
        """
        if not measured:
            return self
        places, every = np.array(list(measured)), np.arange(len(self.logs))
        residual = Residual(
            covariance=lambda left, right: self.covariance[np.ix_(left, right)],
            points=places,
            errors=np.array(list(measured.values())) - self.logs[places],
            noise=self.noise**2,
        )
        return PlanBeliefs(
            logs=self.logs + residual.expected(every),
            covariance=self.covariance - residual.explained_covariance(every),
            noise=self.noise,
        )

    @property
    def best(self) -> int:
        """The plan that is believed to be fastest."""
        return int(np.argmin(self.logs))

    def worth(self) -> Floats:
        """Expected gain of the plan that is chosen in the end if each plan is run next, [plans].

        The gain is a share of the step time: 0.02 means that steps are expected to take 2 % less.
        """
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        weights = weights / weights.sum()
        spread = np.sqrt(np.maximum(np.diag(self.covariance), 0.0) + self.noise**2)
        moved = self.covariance / spread  # change of each plan if the run of another shows one standard deviation more
        fastest = np.min(self.logs[:, None, None] + moved[:, :, None] * nodes, axis=0)
        return np.asarray(np.maximum(self.logs.min() - fastest @ weights, 0.0))

    def next_plan(self, but: Collection[int] = ()) -> int:
        """The plan to run next, without those that were run; raises `ValueError` if all were."""
        optimistic = self.logs - np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return min((plan for plan in range(len(self.logs)) if plan not in but), key=lambda plan: float(optimistic[plan]))
