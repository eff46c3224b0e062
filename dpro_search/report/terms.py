"""The terms of the cost models of jobs, in words."""

from __future__ import annotations

import numpy as np

from dpro_search.costmodel.horovod import CommCosts
from dpro_search.report import units
from dpro_search.report.quality import Term
from dpro_search.space.byteps_job import BytepsJob
from dpro_search.space.kvstore_job import KvstoreJob


def cost_terms(costs: CommCosts) -> tuple[Term, ...]:
    """Costs of an all-reduce in the fitted model."""
    negotiation = [float(np.median(waits)) if len(waits) else 0.0 for waits in (costs.negotiate_busy_us, costs.negotiate_idle_us)]
    rows = (
        ("latency, busy ranks", units.duration(costs.alpha_busy_us), "an all-reduce of few bytes while a rank computes"),
        ("latency, large tensors", units.duration(costs.alpha_more_us), "added to a large all-reduce while a rank computes"),
        ("latency, idle ranks", units.duration(costs.alpha_tail_us), "an all-reduce once all ranks have computed"),
        ("transfer, busy ranks", _per_byte(costs.beta_busy_us), "time per byte while a rank computes"),
        ("transfer, idle ranks", _per_byte(costs.beta_tail_us), "time per byte once all ranks have computed"),
        ("CPU time of a transfer", _per_byte(costs.cpu_us), "taken from the compute time of each rank"),
        ("copies in and out", _per_byte(costs.copy_in_us + costs.copy_out_us), "into the fusion buffer and back"),
        (
            "negotiation, busy ranks",
            units.duration(negotiation[0]),
            "median, from the start of a cycle to the list of tensors to send",
        ),
        ("negotiation, idle ranks", units.duration(negotiation[1]), "the same while no rank computes"),
        ("between collectives", units.duration(costs.dispatch_us), "callbacks and preparation"),
        ("burst", units.duration(costs.burst_us), "largest lead of an idle link over its rate (token bucket)"),
        ("residual spread", units.percent(costs.residual_pct), "standard deviation of measured over fitted transfers of a step"),
    )
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def store_terms(job: KvstoreJob | BytepsJob) -> tuple[Term, ...]:
    """Costs of a job with parameter servers, estimated from its recording."""
    link = "no limit" if job.bytes_per_us is None else f"{job.bytes_per_us:.0f} MB/s"
    rows = [("link", link, "largest rate at which a host sends or receives")]
    if isinstance(job, KvstoreJob):
        rows += [
            ("CPU time of messages", _per_byte(job.comm_us_per_byte), "of a process, for the bytes that it sends or receives"),
            ("copies and calls of a worker", _per_byte(float(np.mean(job.beside_us_per_byte))), "in addition to its messages"),
            ("first part on a server", _per_byte(job.copy_us_per_byte), "copied on arrival"),
            ("further parts on a server", _per_byte(job.sum_us_per_byte), "each added to the sum"),
            ("update", _per_byte(job.update_us_per_byte), "of the weights, after all parts have arrived"),
            ("slice", units.duration(job.slice_us), "CPU time of a server for the messages of a slice of any size"),
            ("call of the optimizer", units.duration(job.update_call_us), "for each slice, if servers update the weights"),
        ]
    else:
        rows += [
            ("CPU time", _per_byte(job.cpu_us_per_byte), "of a process, for the bytes that it sends, receives or adds"),
            ("message", units.duration(job.message_us), "CPU time of one message, independent of its size"),
            ("before a push", units.duration(job.reduce_us + job.before_push_us), "stages of the worker that use no CPU"),
            ("reply", units.duration(job.reply_us), "time until a message is acknowledged"),
            ("after a pull", units.duration(job.after_pull_us), "time from the arrival of the sum to its use"),
            ("polling, workers", units.percent(job.worker_polling * 100), "share of one core of each"),
            ("polling, servers", units.percent(job.server_polling * 100), "share of one core of each"),
        ]
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def _per_byte(value_us: float) -> str:
    return f"{value_us * 2**20 / 1e3:.2f} ms/MiB"
