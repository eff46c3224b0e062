"""What a recording of a Horovod job says of its knobs."""

import numpy as np
import pytest

from dpro_search.collect.assemble.common import event_columns
from dpro_search.collect.assemble.horovod_phases import HorovodJobFile, settings_with_groups, timeline_warnings
from dpro_search.collect.readers.horovod.timeline import HorovodTimeline
from dpro_search.collect.trace import CommSettings, EventKind, TensorInfo

SETTINGS = CommSettings(fusion_threshold_bytes=2**27, cycle_time_us=1000.0)


def tensors(**node_of: str) -> list[TensorInfo]:
    return [TensorInfo(name=name, node=node, dtype="float32", shape=(), size_bytes=4) for name, node in node_of.items()]


def job(**knobs: str) -> HorovodJobFile:
    return HorovodJobFile(ranks=2, settings=SETTINGS, command=(), machine="", recorded_at="", knobs=knobs)


def test_tensors_of_one_op_are_an_exact_group_where_groups_may_not_be_fused():
    tensor_groups = settings_with_groups(
        job(HOROVOD_DISABLE_GROUP_FUSION="1"), tensors(a="one", b="two", c="one", d="two", e="alone")
    )
    assert tensor_groups.groups == (("a", "c"), ("b", "d"))
    assert (tensor_groups.fusion_threshold_bytes, tensor_groups.cycle_time_us) == (2**27, 1000.0)


@pytest.mark.parametrize("knobs", [{}, {"HOROVOD_CONTROLLER": "gloo"}])
def test_groups_that_may_be_fused_with_others_are_no_exact_groups(knobs):
    assert settings_with_groups(job(**knobs), tensors(a="one", b="one")) == SETTINGS


def test_without_a_group_the_threshold_decides():
    assert settings_with_groups(job(HOROVOD_DISABLE_GROUP_FUSION="1"), tensors(a="one", b="two")) == SETTINGS


def test_a_timeline_that_is_cut_early_tells_how_much_is_missing():
    """Three profiled steps of two all-reduces; the timeline ends in the middle of the second."""
    events = event_columns(
        name=np.zeros(6, np.int64),
        kind=EventKind.COMM,
        start_us=np.arange(6.0),
        end_us=np.arange(6.0) + 1,
        step=np.array([4, 4, 5, 5, 6, 6]),
        collective=np.array([0, 1, 2, -1, -1, -1]),
    )
    timeline = HorovodTimeline(
        origin_ns=0, tensors=(), cycle_us=np.zeros(0), unfinished=0, skipped={}, truncated=True,
        dropped={"damaged records of t": 2},
        **{name: np.zeros(0, np.int64) for name in ("tensor", "phase", "start_us", "end_us", "collective")},
    )  # fmt: skip
    assert timeline_warnings(timeline, events) == [
        "horovod_timeline.json is cut off; the last record was left out",
        "left out: 2 damaged records of t",
        "horovod_timeline.json lacks 3 of the 6 all-reduces of the profiled steps, in 2 of 3 steps: "
        "was the job ended early, or the file cut?",
    ]
