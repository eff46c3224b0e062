"""Terms of an all-reduce: the formula, the fit, and other clusters."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import measured, sample

from dpro_search.collect.trace import EventKind
from dpro_search.costmodel.collectives.horovod import (
    at_cluster,
    fit_comm_costs,
    fit_transfer,
    saturation,
    usual_alpha_us,
    wire_us_per_byte,
)
from dpro_search.errors import GraphError


def test_a_ring_of_two_sends_every_byte_once():
    assert wire_us_per_byte(8e6, 2) == pytest.approx(1.0, rel=0.06)  # 1 byte/us, and the headers of TCP


def test_a_large_ring_sends_every_byte_almost_twice():
    assert wire_us_per_byte(1e9, 1000) == pytest.approx(2 * wire_us_per_byte(1e9, 2), rel=0.01)


def test_a_link_without_limit_costs_nothing():
    assert wire_us_per_byte(None, 8) == 0


@settings(derandomize=True)  # the bounds hold for almost all noise, not for all
@given(st.floats(2000, 5000), st.floats(1500, 4000), st.floats(0.0, 2e-3), st.integers(0, 1000))
def test_the_fit_finds_the_terms_it_was_made_from(alpha, alpha_tail, extra, seed):
    rng = np.random.default_rng(seed)
    wire, cpu = 4e-3, 1e-3
    size = rng.choice([1e3, 1e4, 2e5, 1e6, 4e6, 1.6e7], size=800)
    busy = rng.choice([0.0, 1.0], size=800)
    latency = busy * (alpha + 2000 * saturation(size)) + (1 - busy) * alpha_tail
    exact = latency + size * (wire + busy * extra)
    busy_us, more_us, idle_us, beta_busy, beta_tail = fit_transfer(
        size, exact * rng.normal(1, 0.01, size=800), busy, busy, wire, cpu, 1.5, usual_alpha_us(None)
    )
    assert busy_us + more_us == pytest.approx(alpha + 2000, rel=0.1)
    assert idle_us == pytest.approx(alpha_tail, abs=200)
    assert beta_busy == pytest.approx(wire + extra, rel=0.05)
    assert beta_tail == pytest.approx(wire, rel=0.05)


def test_where_neither_link_nor_processors_are_known_the_tail_takes_what_was_seen_before_it():
    size, busy = np.full(20, 4e6), np.ones(20)
    *_, beta_busy, beta_tail = fit_transfer(size, 6000 + 3e-3 * size, busy, busy, 0.0, 0.0, 1.0, usual_alpha_us(None))
    assert 0 < beta_tail == beta_busy


def test_usual_latencies_follow_the_rate_within_what_is_known():
    slow, between, fast = (usual_alpha_us(rate) for rate in (5e8, 1e9, 2e9))
    assert between == pytest.approx((slow + fast) / 2)
    assert usual_alpha_us(1e8) == pytest.approx(slow)
    assert usual_alpha_us(None) == pytest.approx(fast)


def test_another_rate_changes_latencies_as_it_does_the_usual_ones_and_the_burst():
    costs = measured().costs
    slower = at_cluster(costs, 1.5, (2e9, 2), (5e8, 2))
    assert slower.alpha_tail_us == pytest.approx(costs.alpha_tail_us - 1300)
    assert slower.burst_us == pytest.approx(4 * costs.burst_us)
    assert at_cluster(costs, 1.5, (2e9, 2), (None, 2)).burst_us == 0


def test_a_job_that_ran_on_plain_links_is_predicted_for_plain_links():
    plain = replace(measured().costs, burst_us=0.0)
    moved_costs = at_cluster(plain, 1.5, (None, 2), (5e8, 2))
    assert (moved_costs.burst_us, moved_costs.alpha_tail_us) == (0, plain.alpha_tail_us)


def test_a_link_without_limit_takes_time_even_where_processors_are_not_known():
    free = at_cluster(replace(measured().costs, cpu_us=0.0, beta_tail_us=0.0), 1.5, (2e9, 2), (None, 2))
    assert 0 < free.beta_tail_us <= free.beta_busy_us


def test_the_fit_on_the_sample_respects_the_wire_and_explains_its_transfers():
    costs, meta = measured().costs, sample().meta
    assert costs.beta_busy_us >= costs.beta_tail_us >= wire_us_per_byte(meta.rate_bps, meta.ranks)
    assert costs.residual_pct < 20
    assert 0 < costs.cpu_us < costs.beta_tail_us


def test_the_recorded_cluster_changes_nothing():
    costs = measured().costs
    assert at_cluster(costs, 1.5, (2e9, 2), (2e9, 2)) is costs


@given(st.floats(1e8, 1e11))
def test_a_slower_link_is_never_faster(rate):
    costs = measured().costs
    here, slower = (at_cluster(costs, 1.5, (2e9, 2), (r, 2)) for r in (rate, rate / 2))
    assert slower.beta_tail_us >= here.beta_tail_us
    assert slower.beta_busy_us >= here.beta_busy_us


def test_without_a_limit_the_processors_are_the_limit():
    costs = measured().costs
    free = at_cluster(costs, 1.5, (2e9, 2), (None, 2))
    assert costs.cpu_us <= free.beta_tail_us < costs.beta_tail_us


def test_more_ranks_move_more_bytes_and_need_more_messages():
    costs = measured().costs
    more = at_cluster(costs, 1.5, (2e9, 2), (2e9, 4))
    assert more.beta_tail_us == pytest.approx(1.5 * costs.beta_tail_us, rel=0.1)
    assert more.alpha_tail_us == pytest.approx(3 * costs.alpha_tail_us)


def test_a_trace_without_collectives_is_refused():
    trace = sample()
    silent = replace(trace, events=trace.events.select(trace.events.kind != EventKind.ALLREDUCE))
    with pytest.raises(GraphError, match="no all-reduce"):
        fit_comm_costs(silent, measured().graph)
