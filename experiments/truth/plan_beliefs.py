"""`PlanBeliefs`: step times of plans of one job after some of them were run, and which one to run next.

The logarithm of a measured step is that of its prediction plus an error. Errors of plans have a normal distribution in common:
efficiencies of devices, links and hosts that are other than predicted move all plans, each by its slopes; the rest is each plan's
own. So the run of one plan says something about the others.

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

_NODES = 24  # of the quadrature over what a run may show


@dataclass(frozen=True, kw_only=True)
class PlanBeliefs:
    """Predictions of plans and the errors that they have in common.

    Attributes
    ----------
    logs
        Logarithm of each plan's predicted step time, [plans].
    covariance
        Of the errors of `logs`, [plans, plans].
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
            Logarithm of the measured step time, by the number of the plan.
        """
        if not measured:
            return self
        places, values = list(measured), np.array(list(measured.values()))
        known = self.covariance[np.ix_(places, places)] + self.noise**2 * np.eye(len(places))
        gain = np.linalg.solve(known, self.covariance[places]).T
        logs = self.logs + gain @ (values - self.logs[places])
        return PlanBeliefs(logs=logs, covariance=self.covariance - gain @ self.covariance[places], noise=self.noise)

    @property
    def best(self) -> int:
        """The plan that is believed to be fastest."""
        return int(np.argmin(self.logs))

    def worth(self) -> Floats:
        """By how much the run of each plan is expected to make the plan faster that is chosen then, [plans].

        It is a share of the step time: 0.02 means 2 %.
        """
        nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
        weights = weights / weights.sum()
        spread = np.sqrt(np.maximum(np.diag(self.covariance), 0.0) + self.noise**2)
        moved = self.covariance / spread  # of each plan, by a run of each that shows one standard deviation more
        fastest = np.min(self.logs[:, None, None] + moved[:, :, None] * nodes, axis=0)
        return np.asarray(np.maximum(self.logs.min() - fastest @ weights, 0.0))

    def next_plan(self, but: Collection[int] = ()) -> int:
        """The plan to run next, without those that were run; raises `ValueError` if all were."""
        optimistic = self.logs - np.sqrt(np.maximum(np.diag(self.covariance), 0.0))
        return min((plan for plan in range(len(self.logs)) if plan not in but), key=lambda plan: float(optimistic[plan]))
