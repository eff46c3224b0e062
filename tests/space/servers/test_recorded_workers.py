"""What the steps of a job with servers say of its workers."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from dpro_search.collect.trace import SETTLING_STEPS, Steps
from dpro_search.errors import GraphError
from dpro_search.space.servers.kvstore_recorded import recorded_kvstore_job
from dpro_search.space.servers.recorded_workers import server_hosts, slowest_worker, untraced_us
from tests.recordings import trace_of


def steps(*ranks, traced=0):
    """CPU times of each rank's steps in us, of which the last `traced` are profiled."""
    count = len(ranks[0])
    cpu_us = np.concatenate([np.array(row, dtype=np.float64) for row in ranks])
    start_us = np.tile(np.arange(count) * 1e6, len(ranks))
    of_one = np.arange(count) >= count - traced
    measured_steps = Steps(
        rank=np.repeat(np.arange(len(ranks)), count),
        index=np.tile(np.arange(count), len(ranks)),
        start_us=start_us,
        end_us=start_us + 1e5,
        traced=np.tile(of_one, len(ranks)),
        compute_cpu_us=0.8 * cpu_us,
        comm_cpu_us=0.2 * cpu_us,
    )
    return SimpleNamespace(steps=measured_steps)


def alternating(by, first=1):
    return 1e5 * (1 + by * first * (-1.0) ** np.arange(20))


def test_workers_that_are_slow_in_turn_make_every_step_slow():
    assert slowest_worker(steps(alternating(0.1), alternating(0.1, first=-1)), 2) == pytest.approx(1.1)


def test_workers_that_are_slow_together_or_always_have_that_in_their_means():
    assert slowest_worker(steps(alternating(0.1), alternating(0.1)), 2) == pytest.approx(1)
    assert slowest_worker(steps(np.full(20, 1e5), np.full(20, 3e5)), 2) == pytest.approx(1)


def test_steps_of_the_start_and_of_the_profiler_say_nothing():
    row = np.full(20, 1e5)
    row[:SETTLING_STEPS] *= 4
    row[-5:] *= 2
    trace = steps(row, np.full(20, 1e5), traced=5)
    assert slowest_worker(trace, 2) == pytest.approx(1)
    assert untraced_us(trace, 0, trace.steps.compute_cpu_us) == pytest.approx(0.8e5)


def test_where_steps_do_not_tell_nothing_is_assumed():
    assert slowest_worker(steps(alternating(0.1)), 1) == 1
    assert slowest_worker(steps(alternating(0.1), np.zeros(20)), 2) == 1
    assert slowest_worker(steps([]), 2) == 1


@pytest.mark.parametrize(
    ("names", "rate_bps", "hosts"),
    [
        (("h0", "h1", "h2", "h3"), 1e9, (2, 3)),
        (("h0", "h1", "h1", "h0"), 1e9, (1, 0)),
        (("h0", "h1", "h1", "h0"), None, (1, 0)),  # hosts whose links have no limit
        (("h0", "h1", "h1", "h4"), 1e9, (1, 3)),
        (("vm", "vm", "vm", "vm"), None, (2, 3)),  # a machine as it is
    ],
)
def test_a_server_is_where_the_worker_of_its_host_s_name_is(names, rate_bps, hosts):
    meta = SimpleNamespace(hosts=names, ranks=len(names), rate_bps=rate_bps)
    assert server_hosts(SimpleNamespace(meta=meta), 2) == hosts


def test_the_name_of_a_single_worker_tells_only_where_hosts_have_links():
    shaped, machine = (SimpleNamespace(meta=SimpleNamespace(hosts=("h0", "h0"), ranks=2, rate_bps=rate)) for rate in (1e9, None))
    assert (server_hosts(shaped, 1), server_hosts(machine, 1)) == ((0,), (1,))


@pytest.mark.parametrize("node", ["dense0", "key", "keyring", "key-1"])
def test_a_gradient_whose_node_names_no_key_is_refused_in_one_line(node):
    trace = trace_of("kvstore_mlp")
    renamed = tuple(msgspec.structs.replace(tensor, node=node) for tensor in trace.tensors)
    with pytest.raises(GraphError, match="no known key"):
        recorded_kvstore_job(replace(trace, tensors=renamed))
