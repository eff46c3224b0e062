"""Steps of the all-reduce study: when gradients are there, and what a step takes by the replay of measured exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.allreduce.networks import Network, networks, ready, step_of
from experiments.allreduce.predicted import MIB, STORES, Exchange, busiest_share, loss, predicted_us

NETWORK = Network(name="three layers", pixels=8, tensors=((MIB, 100.0), (MIB // 4, 200.0), (4 * MIB, 300.0)))
STEP = step_of(NETWORK, 900e3)
EXCHANGE = Exchange(latency_us=0.0, message_us=0.0, us_per_byte=0.01, link_us_per_byte=0.01)


def test_gradients_come_from_the_last_layer_on_after_their_part_of_the_multiplications():
    assert STEP.compute_us == pytest.approx(900e3)
    assert STEP.size_bytes == NETWORK.size_bytes
    times = [(round(at), some) for at, some in ready(STEP)]
    assert times == [(600_000, (4 * MIB,)), (800_000, (MIB // 4,)), (900_000, (MIB,))]


def test_the_networks_are_the_published_ones():
    parameters = {name: network.size_bytes / 4e6 for name, network in networks().items()}
    assert parameters["resnet-50"] == pytest.approx(25.6, abs=0.1)
    assert parameters["mobilenet"] == pytest.approx(4.2, abs=0.1)
    assert parameters["nasnet-large"] == pytest.approx(88.7, abs=0.3)
    assert networks()["resnet-50"].multiplications == pytest.approx(3.86e9, rel=0.02)  # He et al. 2015: 3.8 billion
    by_byte = [network.multiplications / network.size_bytes for network in networks().values()]
    assert by_byte == sorted(by_byte, reverse=True)


def test_a_ring_that_waits_for_all_gradients_adds_its_whole_time():
    assert predicted_us("tf-ring", STEP, EXCHANGE) == pytest.approx(900e3 + 0.01 * STEP.size_bytes)


def test_buckets_overlap_with_the_rest_of_the_backward_pass():
    first, last = 0.01 * 16 * MIB, 0.01 * 5 * MIB  # the first bucket is full at 1 MiB, the rest are one
    assert 600e3 + first < 900e3
    assert predicted_us("ddp-gloo", STEP, EXCHANGE) == pytest.approx(900e3 + last)


def test_a_busy_link_is_what_a_step_takes_in_the_end():
    slow = replace(EXCHANGE, us_per_byte=0.1, link_us_per_byte=0.1)
    assert predicted_us("ddp-gloo", STEP, slow) == pytest.approx(600e3 + 0.1 * STEP.size_bytes)


def test_horovod_sums_together_what_came_while_it_was_busy():
    slow = replace(EXCHANGE, us_per_byte=0.02, message_us=50e3)  # the first one, of 16 MiB, ends when all others are there
    assert predicted_us("horovod-mpi", STEP, slow) == pytest.approx(600e3 + 2 * 50e3 + 0.02 * STEP.size_bytes)


def test_variables_of_servers_are_read_while_the_forward_pass_goes_on_and_half_of_the_time_is_hidden():
    whole = 0.01 * STEP.size_bytes
    taken = predicted_us("tf-ps", STEP, EXCHANGE)
    assert 900e3 < taken < 900e3 + 2 * whole


def test_a_store_sends_sums_back_beside_what_it_is_sent():
    first, rest = 16 * MIB, 5 * MIB
    slow = replace(EXCHANGE, us_per_byte=0.1, link_us_per_byte=0.1)
    assert predicted_us("mxnet-kvstore", STEP, slow) == pytest.approx(600e3 + 0.1 * (first + first + rest))


def test_a_unit_larger_than_any_that_was_measured_takes_as_long_for_a_byte():
    measured = replace(EXCHANGE, sizes_bytes=(4.0, 1000.0), sizes_us=(10.0, 50.0))
    assert measured.unit_us(3000) == pytest.approx(150.0)


def test_horovod_takes_what_is_there_when_copies_have_delayed_it():
    whole = 0.02 * STEP.size_bytes  # the first of two sums is still busy when the last gradient comes, however late
    slow = replace(EXCHANGE, us_per_byte=0.02, copied_us_per_byte=0.002)
    first_us = 600e3 + 0.002 * 16 * MIB
    assert predicted_us("horovod-mpi", STEP, slow) == pytest.approx(first_us + whole, abs=2 * 5e3)


def test_the_busiest_server_has_whole_variables_of_tensorflow_and_parts_of_kvstores_large_tensors():
    sizes = [4 * MIB, MIB // 4, MIB]
    assert busiest_share("tf-ps", sizes, 2) == pytest.approx(5 / 5.25 * 2)
    assert busiest_share("mxnet-kvstore", sizes, 2) == pytest.approx((2.5 + 0.25) / 5.25 * 2)
    assert busiest_share("mxnet-byteps", [2_048_000], 2) == pytest.approx(1.0)
    unequal = replace(EXCHANGE, servers=2)
    assert predicted_us("tf-ps", STEP, unequal) > predicted_us("mxnet-kvstore", STEP, unequal) > 900e3


@pytest.mark.parametrize("scheme", ["tf-ring", "ddp-gloo", "horovod-gloo", "mxnet-kvstore", "tf-ps"])
def test_the_parts_of_a_loss_are_the_loss(scheme):
    exchange = replace(EXCHANGE, latency_us=9e3, message_us=2e3, us_per_byte=0.08, link_us_per_byte=0.03, copied_us_per_byte=0.002)
    parts = loss(scheme, STEP, exchange)
    each = (parts.copies_us, parts.latency_us, parts.server_us, parts.waiting_us, parts.bandwidth_us)
    assert min(each) >= 0
    assert sum(each) == pytest.approx(predicted_us(scheme, STEP, exchange) - STEP.compute_us)
    assert parts.server_us > 0
    assert (parts.waiting_us > 0) == (scheme in ("tf-ring", *STORES)), "for all gradients, or for what servers send back"
