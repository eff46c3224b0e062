"""The terms of the cost models of jobs, in words."""

from __future__ import annotations

import numpy as np

from dpro_search.costmodel.horovod import CommCosts
from dpro_search.report import units
from dpro_search.report.quality import Term
from dpro_search.space.byteps_job import BytepsJob
from dpro_search.space.kvstore_job import KvstoreJob


def cost_terms(costs: CommCosts) -> tuple[Term, ...]:
    """What an all-reduce costs by the fitted model."""
    agreement = [float(np.median(waits)) if len(waits) else 0.0 for waits in (costs.negotiate_busy_us, costs.negotiate_idle_us)]
    rows = (
        ("latency, busy ranks", units.duration(costs.alpha_busy_us), "an all-reduce of few bytes while a rank computes"),
        (
            "latency, large tensors",
            units.duration(costs.alpha_more_us),
            "what a large all-reduce takes on top, while a rank computes",
        ),
        ("latency, idle ranks", units.duration(costs.alpha_tail_us), "an all-reduce once all ranks have computed"),
        ("transfer, busy ranks", _per_byte(costs.beta_busy_us), "time per byte while a rank computes"),
        ("transfer, idle ranks", _per_byte(costs.beta_tail_us), "time per byte once all ranks have computed"),
        ("processor time of a transfer", _per_byte(costs.cpu_us), "taken from the compute of each rank"),
        ("copies in and out", _per_byte(costs.copy_in_us + costs.copy_out_us), "into the fusion buffer and back"),
        ("agreement, busy ranks", units.duration(agreement[0]), "median, from a cycle's start to what is sent"),
        ("agreement, idle ranks", units.duration(agreement[1]), "the same while no rank computes"),
        ("between collectives", units.duration(costs.dispatch_us), "callbacks and preparation"),
        ("burst", units.duration(costs.burst_us), "by which a link that has rested is ahead of its rate, at most"),
        ("spread left over", units.percent(costs.residual_pct), "standard deviation of measured over fitted transfers of a step"),
    )
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def store_terms(job: KvstoreJob | BytepsJob) -> tuple[Term, ...]:
    """What a job with parameter servers costs by what was read off its recording."""
    link = "no limit" if job.bytes_per_us is None else f"{job.bytes_per_us:.0f} MB/s"
    rows = [("link", link, "what a host sends, or receives, at most")]
    if isinstance(job, KvstoreJob):
        rows += [
            ("processor time of messages", _per_byte(job.comm_us_per_byte), "of a process, for what it sends or receives"),
            ("copies and calls of a worker", _per_byte(float(np.mean(job.beside_us_per_byte))), "beside its messages"),
            ("first part on a server", _per_byte(job.copy_us_per_byte), "copied"),
            ("further parts on a server", _per_byte(job.sum_us_per_byte), "added, each"),
            ("update", _per_byte(job.update_us_per_byte), "of the weights, once all parts are there"),
            ("slice", units.duration(job.slice_us), "core time of a server for the messages of a slice of any size"),
            ("call of the optimizer", units.duration(job.update_call_us), "for each slice, where servers update"),
        ]
    else:
        rows += [
            ("processor time", _per_byte(job.cpu_us_per_byte), "of a process, for what it sends, receives or adds"),
            ("message", units.duration(job.message_us), "core time of a message of any size"),
            ("before a push", units.duration(job.reduce_us + job.before_push_us), "stages of the worker that take no core"),
            ("reply", units.duration(job.reply_us), "until a message is acknowledged"),
            ("after a pull", units.duration(job.after_pull_us), "from the arrival of the sum to its use"),
            ("looking for work, workers", units.percent(job.worker_polling * 100), "of the core of each"),
            ("looking for work, servers", units.percent(job.server_polling * 100), "of the core of each"),
        ]
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def _per_byte(value_us: float) -> str:
    return f"{value_us * 2**20 / 1e3:.2f} ms/MiB"
