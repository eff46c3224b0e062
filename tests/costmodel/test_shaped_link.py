"""What transfers are spared on a link that saves up while it rests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.launch.host_limits import burst_bytes, burst_us
from dpro_search.costmodel.collectives.horovod import rested_us, spared_us

WIRE_US, BURST_US = 0.016, 2000.0  # per byte of a tensor, and of the link


def transfers(sizes, pauses_us, latencies_us):
    """Times of transfers on such a link, one after the other: (start, end, wire)."""
    now, sent_by = 0.0, -BURST_US
    rows = []
    for size, pause, latency in zip(sizes, pauses_us, latencies_us, strict=True):
        start = now + pause
        begin = start + latency
        sent_by = max(sent_by, begin - BURST_US) + size * WIRE_US
        now = max(begin, sent_by)
        rows.append((start, now, size * WIRE_US))
    return np.array(rows).T


@given(st.lists(st.tuples(st.floats(1e6, 4e7), st.floats(0, 8000), st.floats(0, 9000)), min_size=1, max_size=30))
def test_latencies_that_could_be_seen_are_found_again(rows):
    sizes, pauses, latencies = (np.array(column) for column in zip(*rows, strict=True))
    start, end, wire = transfers(sizes, pauses, latencies)
    rested = rested_us(start, end, wire, BURST_US)
    spared = spared_us(wire, end - start, rested, np.full(len(sizes), BURST_US))
    latency_us = end - start - wire + spared
    seen = rested + latencies > BURST_US + 1e-3
    assert latency_us[seen] == pytest.approx(latencies[seen], abs=0.01)
    assert (latency_us[~seen] >= -0.01).all()
    assert (latency_us[~seen] <= BURST_US + 0.01).all()


def test_a_small_transfer_leaves_what_the_link_has_saved_to_the_next():
    start, end, wire = transfers([1e3, 4e6], [9000.0, 10.0], [0.0, 0.0])
    assert rested_us(start, end, wire, BURST_US) == pytest.approx([BURST_US, BURST_US - 1e3 * WIRE_US + 10], abs=1)


def test_a_burst_is_what_the_link_saves_while_it_is_full():
    assert burst_us(None) == 0
    assert burst_us(5e8) == pytest.approx(burst_bytes(5e8) / 62.5)
    assert burst_us(1e11) == pytest.approx(500)
