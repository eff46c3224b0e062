"""What a recorded TensorFlow job is said to lack."""

from types import SimpleNamespace

import numpy as np
import pytest
from sample import sample

from dpro_search.collect.assemble.tensorflow_horovod import _warnings
from dpro_search.collect.trace import EventKind


@pytest.mark.parametrize(("share", "warned"), [(0.005, 0), (0.05, 1)])
def test_all_reduces_that_the_profile_cuts_off_are_warned_about_from_one_percent(share, warned):
    events = sample().events
    whole = np.sum((events.kind == EventKind.COMM) & (events.rank == 0))
    rank = SimpleNamespace(profile=SimpleNamespace(dropped={"unpaired": int(share * whole)}))
    timeline = SimpleNamespace(truncated=False, dropped={})
    assert len([text for text in _warnings([rank], timeline, events) if text.startswith("rank 0: ")]) == warned
