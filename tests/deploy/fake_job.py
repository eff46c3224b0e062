"""A job whose runs take given times, in place of a real one."""

import numpy as np

from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.deploy.jobs import JobRun
from dpro_search.deploy.losses import Loss
from dpro_search.deploy.validate import validate
from dpro_search.errors import JobError
from dpro_search.space.plan import Plan, Prediction

FAST, SLOW = Plan.of(cycle_time_us=1.0), Plan.of(cycle_time_us=2.0)


def prediction(us):
    return Prediction(
        iteration_us=us,
        interval_us=(us * 0.95, us * 1.05),
        breakdown_us={"compute": us * 0.6, "exposed_communication": us * 0.4},
        peak_memory_bytes=None,
        source="recorded",
    )


class FakeJob:
    """Iterations around the given medians; `spread` is that between runs; losses by plan; `fails`: plans' runs by their number."""

    def __init__(self, medians_us, spread=0.0, losses=None, fails=()):
        self.medians_us, self.spread, self.losses, self.fails = medians_us, spread, losses or {}, fails
        self.ran, self.limits_s = [], []
        self._rng = np.random.default_rng(0)

    def run(self, plan, *, warmup, timeout_s):
        self.ran.append(plan)
        self.limits_s.append(timeout_s)
        if (plan, self.ran.count(plan)) in self.fails:
            raise JobError(f"failed at {plan.get('cycle_time_us')} us")
        centre = self.medians_us[plan] * (1 + self.spread * self._rng.normal())
        us = centre * (1 + 0.01 * self._rng.normal(size=30))
        times = StepTimes(iteration_us=us, compute_cpu_us=us, comm_cpu_us=us)
        return JobRun(times=times, losses=tuple(map(Loss, self.losses.get(plan, (3.0, 2.0, 1.0)))))


def validated(job, **options):
    return validate(job, prediction(4e5), [(FAST, prediction(3e5)), (SLOW, prediction(5e5))], **options)
