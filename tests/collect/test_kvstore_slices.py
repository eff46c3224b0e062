"""Which server gets which part of a gradient."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.errors import InputError


def test_a_small_tensor_goes_to_the_server_of_its_key_and_a_large_one_to_all():
    assert Slicing(servers=2, bound=10).parts([0, 1, 3], [9, 9, 11]) == [[(0, 9)], [(1, 9)], [(0, 6), (1, 5)]]


def test_priority_slices_go_round_the_servers_in_the_order_of_the_keys():
    rule = Slicing(servers=2, priority=True, slice_threshold=10)
    assert rule.parts([1, 0], [25, 5]) == [[(1, 10), (0, 10), (1, 5)], [(0, 5)]]


def test_a_key_without_a_gradient_takes_its_turn():
    rule = Slicing(servers=2, priority=True, slice_threshold=10)
    assert rule.parts([0, 2], [5, 5]) == [[(0, 5)], [(0, 5)]]


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=20),
    st.integers(1, 5),
    st.booleans(),
    st.integers(1000, 10**6),
)
def test_every_element_is_on_one_server(elements, servers, priority, limit):
    rule = Slicing(servers=servers, bound=limit, priority=priority, slice_threshold=limit)
    for parts, count in zip(rule.parts(range(len(elements)), elements), elements, strict=True):
        assert sum(size for _, size in parts) == count
        assert all(0 <= server < servers and size > 0 for server, size in parts)


def test_the_rule_of_a_recording_follows_from_its_knobs():
    rule = Slicing.of_knobs({"DMLC_PS_VAN_TYPE": "p3", "MXNET_KVSTORE_SLICE_THRESHOLD": "7"}, servers=3)
    assert (rule.priority, rule.slice_threshold, rule.bound, rule.servers) == (True, 7, 1_000_000, 3)


@pytest.mark.parametrize("text", ["many", "-1", "0", "1e6"])
def test_a_knob_that_is_no_number_is_refused(text):
    with pytest.raises(InputError):
        Slicing.of_knobs({"MXNET_KVSTORE_BIGARRAY_BOUND": text}, servers=1)
