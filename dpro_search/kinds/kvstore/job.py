"""`Kvstore`: a job of MXNet with parameter servers (KVStore, P3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from dpro_search.kinds._answers import per_byte
from dpro_search.kinds._diagnosis import Diagnosis
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds.servers.job import ParameterServerJob
from dpro_search.quantities import typeset_time_text
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from dpro_search.space.servers.kvstore_job import KvstoreJob, kvstore_graph, store_bytes_per_us
from dpro_search.space.servers.kvstore_recorded import recorded_kvstore_job
from dpro_search.space.servers.placement import on_workers
from dpro_search.space.transformations import (
    KeySlicing,
    KvstoreCompression,
    PlanningFacts,
    PlanSpace,
    ServerCount,
    ServerPlacement,
    Transformation,
    kvstore_under,
)


class Kvstore(ParameterServerJob[KvstoreJob]):
    """Servers, their hosts and slicing of MXNet's KVStore."""

    title = "a job with parameter servers"
    askable = ("servers", "servers_on_workers", "bigarray_bound", "p3", "slice_threshold", "compression")
    error_bar = "kvstore"

    _recorded = staticmethod(recorded_kvstore_job)
    _under = staticmethod(kvstore_under)
    _built = staticmethod(kvstore_graph)
    _goodput = staticmethod(store_bytes_per_us)

    def _plans_of(self, job: KvstoreJob, *, allow_lossy: bool) -> PlanSpace:
        slicing = job.slicing
        values = {
            "servers": slicing.servers,
            "servers_on_workers": on_workers(len(job.workers), job.server_host),
            "bigarray_bound": slicing.bound,
            "p3": slicing.priority,
            "slice_threshold": slicing.slice_threshold,
        }
        facts = PlanningFacts(name=self.title, tensors=self.tensors, values=values)
        elements = np.round(job.tensor_bytes / job.element_bytes).astype(np.int64)
        placement = ServerPlacement(facts, limited=job.bytes_per_us is not None)
        transformations: list[Transformation] = [ServerCount(facts), KeySlicing(facts, tuple(elements.tolist())), placement]
        if allow_lossy:
            transformations.append(KvstoreCompression(facts, [tensor.dtype for tensor in self.tensors]))
        return PlanSpace(facts, transformations)

    def _cost_rows(self, job: KvstoreJob) -> tuple[tuple[str, str, str], ...]:
        return (
            ("CPU time of messages", per_byte(job.comm_us_per_byte), "of a process, for the bytes that it sends or receives"),
            ("copies and calls of a worker", per_byte(float(np.mean(job.beside_us_per_byte))), "in addition to its messages"),
            ("first part on a server", per_byte(job.copy_us_per_byte), "copied on arrival"),
            ("further parts on a server", per_byte(job.sum_us_per_byte), "each added to the sum"),
            ("update", per_byte(job.update_us_per_byte), "of the weights, after all parts have arrived"),
            ("slice", typeset_time_text(job.slice_us), "CPU time of a server for the messages of a slice of any size"),
            ("call of the optimizer", typeset_time_text(job.update_call_us), "for each slice, if servers update the weights"),
        )

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        from dpro_search.kinds.kvstore.diagnosis import questions

        return questions(self.unplanned_job(scenario))

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        from dpro_search.kinds.kvstore.diagnosis import diagnosis

        return diagnosis(self, here)

    def _messages(self, job: KvstoreJob) -> Iterable[tuple[int, int, float]]:
        return ((server, tensor, size) for tensor, row in enumerate(job.slices) for server, size in row)
