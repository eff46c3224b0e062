"""What a recording of a Horovod job says of its knobs."""

import pytest

from dpro_search.collect.horovod_phases import HorovodJobFile, settings_with_groups
from dpro_search.collect.trace import CommSettings, TensorInfo

SETTINGS = CommSettings(fusion_threshold_bytes=2**27, cycle_time_us=1000.0)


def tensors(**node_of: str) -> list[TensorInfo]:
    return [TensorInfo(name=name, node=node, dtype="float32", shape=(), size_bytes=4) for name, node in node_of.items()]


def job(**knobs: str) -> HorovodJobFile:
    return HorovodJobFile(ranks=2, settings=SETTINGS, command=(), machine="", recorded_at="", knobs=knobs)


def test_tensors_of_one_op_are_an_exact_group_where_groups_may_not_be_fused():
    found = settings_with_groups(job(HOROVOD_DISABLE_GROUP_FUSION="1"), tensors(a="one", b="two", c="one", d="two", e="alone"))
    assert found.groups == (("a", "c"), ("b", "d"))
    assert (found.fusion_threshold_bytes, found.cycle_time_us) == (2**27, 1000.0)


@pytest.mark.parametrize("knobs", [{}, {"HOROVOD_CONTROLLER": "gloo"}])
def test_groups_that_may_be_fused_with_others_are_no_exact_groups(knobs):
    assert settings_with_groups(job(**knobs), tensors(a="one", b="one")) == SETTINGS


def test_without_a_group_the_threshold_decides():
    assert settings_with_groups(job(HOROVOD_DISABLE_GROUP_FUSION="1"), tensors(a="one", b="two")) == SETTINGS
