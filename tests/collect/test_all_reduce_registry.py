"""The registry of buffers: each is asked once what it is, and again when it is another."""

from __future__ import annotations

import numpy as np
import pytest

from dpro_search.runtime.all_reduce.dpro_search_all_reduce.memory import Registry


def test_a_buffer_is_asked_once_and_so_is_another_view_of_it():
    registry, array = Registry(), np.zeros(100, np.float32)
    first = registry.memory(array)
    assert registry.memory(array) is first
    assert registry.memory(array[:]) is first
    assert registry.asked == 1
    assert registry.memory(array[:50]) is not first
    assert registry.asked == 2


def test_a_buffer_of_another_type_or_shape_at_the_same_place_is_asked_again():
    registry, array = Registry(), np.zeros(100, np.float32)
    registry.memory(array)
    assert registry.memory(array.view(np.int32)).dtype == "int32"
    assert registry.memory(np.zeros((4, 25), np.float32)).count == 100
    with pytest.raises(ValueError, match="contiguous"):
        registry.memory(array.reshape(10, 10).T)


def test_only_the_last_buffers_are_held_and_all_can_be_let_go():
    registry = Registry(most=2)
    arrays = [np.zeros(size, np.float32) for size in (1, 2, 3)]
    for array in (*arrays, *arrays):
        assert registry.memory(array).count == array.size
    registry.forget()
    before = registry.asked
    registry.memory(arrays[2])
    assert registry.asked == before + 1
