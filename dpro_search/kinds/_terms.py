"""The terms of the cost models of jobs, in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.quantities import percent_text, typeset_time_text


@dataclass(frozen=True, kw_only=True)
class Term:
    """A fitted number of a cost model, in words."""

    name: str
    value: str
    meaning: str


def cost_terms(costs: CommCosts) -> tuple[Term, ...]:
    """Costs of an all-reduce in the fitted model."""
    negotiation = [float(np.median(waits)) if len(waits) else 0.0 for waits in (costs.negotiate_busy_us, costs.negotiate_idle_us)]
    rows = (
        ("latency, busy ranks", typeset_time_text(costs.alpha_busy_us), "an all-reduce of few bytes while a rank computes"),
        ("latency, large tensors", typeset_time_text(costs.alpha_more_us), "added to a large all-reduce while a rank computes"),
        ("latency, idle ranks", typeset_time_text(costs.alpha_tail_us), "an all-reduce once all ranks have computed"),
        ("transfer, busy ranks", per_byte(costs.beta_busy_us), "time per byte while a rank computes"),
        ("transfer, idle ranks", per_byte(costs.beta_tail_us), "time per byte once all ranks have computed"),
        ("CPU time of a transfer", per_byte(costs.cpu_us), "taken from the compute time of each rank"),
        ("copies in and out", per_byte(costs.copy_in_us + costs.copy_out_us), "into the fusion buffer and back"),
        (
            "negotiation, busy ranks",
            typeset_time_text(negotiation[0]),
            "median, from the start of a cycle to the list of tensors to send",
        ),
        ("negotiation, idle ranks", typeset_time_text(negotiation[1]), "the same while no rank computes"),
        ("between collectives", typeset_time_text(costs.dispatch_us), "callbacks and preparation"),
        ("burst", typeset_time_text(costs.burst_us), "largest lead of an idle link over its rate (token bucket)"),
        ("residual spread", percent_text(costs.residual_pct), "standard deviation of measured over fitted transfers of a step"),
    )
    return tuple(Term(name=name, value=value, meaning=meaning) for name, value, meaning in rows)


def link_term(bytes_per_us: float | None) -> Term:
    """The rate of a host's link; None: no limit."""
    value = "no limit" if bytes_per_us is None else f"{bytes_per_us:.0f} MB/s"
    return Term(name="link", value=value, meaning="largest rate at which a host sends or receives")


def per_byte(value_us: float) -> str:
    """Microseconds per byte for people."""
    return f"{value_us * 2**20 / 1e3:.2f} ms/MiB"
