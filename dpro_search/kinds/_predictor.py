"""`JobPredictor`: what predictors of replayed jobs have in common: predictions with intervals, resampled replays."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.kinds._calibration import device_of
from dpro_search.machine import Calibration, Device, calibration, machine_constants
from dpro_search.replay.iterations import IterationTimes
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scale

Gains = list[dict[str, float | str]]


class JobPredictor(ABC):
    """Predictions of plans, deterministic by seed.

    A kind of job defines how it becomes what its engine replays (`job`), how that is replayed (`_replayed`), and the name of its
    model error in the constants of a machine (`error_bar`).
    """

    _device: Device = "cpu"  # on which the recorded ranks compute
    graph: Any
    costs: CommCosts
    tensors: tuple[TensorInfo, ...]

    def __init__(self, cluster: ClusterSpec, peak_rss_bytes: int | None, seed: int) -> None:
        self.cluster = cluster
        self._peak_rss_bytes = peak_rss_bytes
        self._seed = seed
        self._wanted: ClusterSpec | None = None
        self._changed = False  # whether graph or costs are not those of the recording

    @classmethod
    @abstractmethod
    def from_trace(cls, trace: Trace, *, steps: tuple[int, ...] | None = None, with_profiler: bool = False, seed: int = 0) -> Self:
        """Build graph and costs from a trace: from the traced steps named, and with what the profiler added if asked."""

    @abstractmethod
    def at(self, *, graph: Any = None, costs: Any = None, cluster: ClusterSpec | None = None) -> Self:
        """A predictor of a changed job; a new cluster takes the place of the recorded one in every prediction."""

    @abstractmethod
    def job(self, plan: Plan, cluster: ClusterSpec | None = None) -> Any:
        """The job under a plan; raises `InputError` for a plan that it cannot follow."""

    @abstractmethod
    def faster(self, factor: float, rank: int | None = None) -> Self:
        """A predictor of the job with all core times of a rank (None: of all ranks) multiplied by a factor."""

    @staticmethod
    @abstractmethod
    def cheaper(costs: CommCosts, factor: float) -> CommCosts:
        """The costs of communication multiplied by a factor, above the least that the engine takes."""

    @abstractmethod
    def _replayed(self, job: Any, seed: int | np.random.SeedSequence) -> IterationTimes:
        """One replay of a job."""

    def predict(self, plan: Plan, cluster: ClusterSpec | None = None) -> Prediction:
        """The settled iteration time of a plan, with an interval."""
        times = self._replayed(self.job(plan, cluster), self._seed)
        as_recorded = self._is_recorded(plan, cluster)
        centre = times.iteration_us
        # The median of a run varies with its steps; the model's own error comes on top.
        noise = 1.64 * 1.2533 * float(np.std(times.iterations_us)) / np.sqrt(len(times.iterations_us))
        model_error = self.calibration.model_error[0 if as_recorded else 1]
        half = float(np.hypot(np.hypot(noise, model_error * centre), self._uncertainty_us(plan)))
        return Prediction(
            iteration_us=centre,
            interval_us=(centre - half, centre + half),
            breakdown_us=times.breakdown_us,
            peak_memory_bytes=self._memory_bytes(plan),
            source="recorded" if as_recorded else "extrapolated",
            settled=times.settled,
        )

    def scaled(self, scale: Scale) -> Self:
        """A predictor of the job with a part that takes another time.

        Raises
        ------
        InputError
            The rank does not exist, or the link's rate is not known.
        """
        if scale.what == "bandwidth":
            return self.at(cluster=self.wanted_cluster.faster(scale.factor, scale.text))
        if scale.what == "communication":
            if scale.rank is not None:
                raise InputError(f"'{scale.text}': communication of all ranks can be scaled, not of one")
            return self.at(costs=self.cheaper(self.costs, scale.factor))
        scale.check_rank(self.graph.ranks)
        return self.faster(scale.factor, scale.rank)

    def gains(self, others: Mapping[str, Plan], plan: Plan | None = None) -> Gains:
        """Iteration time and gain of the questions that every job raises and of other plans by name, largest gain first."""
        plan = plan or Plan()
        base_us = self.predict(plan).iteration_us
        texts = ["compute=0.9", "communication=0"]
        texts += [f"rank{rank}.compute=0.9" for rank in range(self.graph.ranks)]
        texts += ["bandwidth=2"] if self.cluster.rate_bps is not None else []
        changed_us = {text: self.scaled(Scale.parse(text)).predict(plan).iteration_us for text in texts}
        changed_us |= {name: self.predict(other).iteration_us for name, other in others.items()}
        rows: Gains = [
            {"what_if": name, "predicted_iteration_us": value_us, "gain_us": base_us - value_us}
            for name, value_us in changed_us.items()
        ]
        return sorted(rows, key=lambda row: -float(row["gain_us"]))

    def sampled(
        self,
        plan: Plan,
        cluster: ClusterSpec | None = None,
        *,
        samples: int,
        seed: int = 0,
        threads: int | None = None,
        on_sample: Callable[[], None] = lambda: None,
    ) -> Floats:
        """Iteration times of replays with resampled durations: order of the recorded steps, latencies and negotiations, [samples].

        Parameters
        ----------
        seed
            The result depends on it, not on the number of threads.
        threads
            How many replay at a time; None: one for each processor that this process may use.
        on_sample
            Called after each replay, from the calling thread.

        Raises
        ------
        InputError
            `samples` or `threads` is below 1.
        """
        if samples < 1 or (threads is not None and threads < 1):
            raise InputError(f"samples and threads must be >= 1, not {samples} and {threads}")
        job = self.job(plan, cluster)
        children = np.random.SeedSequence(seed).spawn(samples)
        sampled_us = np.empty(samples)
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            for number, times in enumerate(pool.map(lambda child: self._replayed(job, child), children)):
                sampled_us[number] = times.iteration_us
                on_sample()
        return sampled_us

    @property
    @abstractmethod
    def error_bar(self) -> str:
        """Name of the kind's model error in `machine.ErrorBars`."""

    @property
    def calibration(self) -> Calibration:
        """The model error of predictions, and what it was calibrated on."""
        return calibration(machine_constants(), self.error_bar, self._device, unlike=self._unlike)

    @property
    def _unlike(self) -> str:
        """Properties of the job that the model error was not measured on; empty: none."""
        return ""

    def of_recording(self, trace: Trace) -> Self:
        """This predictor, for ranks that compute on the recorded device."""
        self._device = device_of(trace)
        return self

    @property
    def wanted_cluster(self) -> ClusterSpec:
        """The cluster that predictions are for where none is named."""
        return self._wanted or self.cluster

    def _uncertainty_us(self, plan: Plan) -> float:
        """Uncertainty of the plan's own cost models, in addition to the model's error."""
        return 0.0

    def _is_recorded(self, plan: Plan, cluster: ClusterSpec | None) -> bool:
        return not self._changed and plan == Plan() and (cluster or self.wanted_cluster) == self.cluster

    def _memory_bytes(self, plan: Plan) -> int | None:
        """Measured peak of the process."""
        return self._peak_rss_bytes
