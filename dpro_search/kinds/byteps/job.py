"""`Byteps`: a job of MXNet with BytePS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dpro_search.kinds._job import Table
from dpro_search.kinds._store_diagnosis import diagnosis_tables
from dpro_search.kinds._stores import StoreJob
from dpro_search.kinds._terms import per_byte
from dpro_search.quantities import percent_text, typeset_time_text
from dpro_search.space.plan import Plan
from dpro_search.space.servers.byteps_job import BytepsJob, byteps_graph
from dpro_search.space.servers.byteps_recorded import recorded_byteps_job
from dpro_search.space.servers.placement import on_workers
from dpro_search.space.servers.store_job import goodput_bytes_per_us
from dpro_search.space.transformations import (
    BytepsCompression,
    Credit,
    JobFacts,
    PlanSpace,
    ServerCount,
    ServerPlacement,
    TensorPartition,
    Transformation,
    byteps_under,
)


class Byteps(StoreJob[BytepsJob]):
    """Servers, their hosts, partition size, credit and compression of BytePS."""

    title = "a job with BytePS"
    askable = ("servers", "servers_on_workers", "partition_bytes", "credit", "compression")
    error_bar = "byteps"

    _recorded = staticmethod(recorded_byteps_job)
    _under = staticmethod(byteps_under)
    _built = staticmethod(byteps_graph)
    _goodput = staticmethod(goodput_bytes_per_us)

    def _plans_of(self, job: BytepsJob, *, allow_lossy: bool) -> PlanSpace:
        values = {
            "servers": len(job.server_core),
            "servers_on_workers": on_workers(len(job.workers), job.server_host),
            "partition_bytes": job.partition_bytes,
            "credit": job.credit,
        }
        facts = JobFacts(name=self.title, tensors=self.tensors, values=values)
        placement = ServerPlacement(facts, limited=job.bytes_per_us is not None)
        transformations: list[Transformation] = [TensorPartition(facts), Credit(facts), ServerCount(facts), placement]
        if allow_lossy:
            transformations.append(BytepsCompression(facts, [tensor.dtype for tensor in self.tensors], job.recorded_compression))
        return PlanSpace(facts, transformations)

    def _cost_rows(self) -> tuple[tuple[str, str, str], ...]:
        job = self.unplanned_job
        return (
            ("CPU time", per_byte(job.cpu_us_per_byte), "of a process, for the bytes that it sends, receives or adds"),
            ("message", typeset_time_text(job.message_us), "CPU time of one message, independent of its size"),
            ("before a push", typeset_time_text(job.reduce_us + job.before_push_us), "stages of the worker that use no CPU"),
            ("reply", typeset_time_text(job.reply_us), "time until a message is acknowledged"),
            ("after a pull", typeset_time_text(job.after_pull_us), "time from the arrival of the sum to its use"),
            ("polling, workers", percent_text(job.worker_polling * 100), "share of one core of each"),
            ("polling, servers", percent_text(job.server_polling * 100), "share of one core of each"),
        )

    @property
    def questions(self) -> Mapping[str, Plan]:
        from dpro_search.kinds.byteps.diagnosis import questions

        return questions(self)

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds.byteps.diagnosis import diagnosis

        return diagnosis(self)

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds.byteps.diagnosis import server_table

        return diagnosis_tables(facts, server_table(facts))

    def _messages(self, job: BytepsJob) -> Iterable[tuple[int, int, float]]:
        return ((part.server, tensor, part.size_bytes) for tensor in range(len(job.tensor_bytes)) for part in job.parts(tensor))
