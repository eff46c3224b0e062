"""The publisher's slow ranks of a recorded production job, from the begins and ends of its collectives and messages alone.

The publisher's replay (result-ST.json) gives a slowdown by uneven compute of 1.179, 1.232 of it from the last stage, which computes
the logits: ranks 6 and 7. Its meta file says 2 data-parallel times 4 pipeline ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from importer_kit import shared_traces

from dpro_search.analysis.ranks import ranks
from dpro_search.analysis.ranks.replay import step_gain_us
from dpro_search.analysis.ranks.steps import measured
from dpro_search.collect.readers.stamps.traces import stamps_of_trace
from dpro_search.collect.readers.straggler_analysis import read


@pytest.fixture
def folder() -> Path:
    return shared_traces() / "stragglers"


def test_the_ranks_of_the_publishers_slow_stage_are_named(folder: Path) -> None:
    stamps = stamps_of_trace(read([folder / "trace-ST.parquet"]))
    answer = ranks(stamps)
    stages = json.loads((folder / "result-ST.json").read_text())["blocking_decompose_by_stage"]
    slow_stage = int(max(stages, key=stages.get))
    assert {(finding.kind, finding.ranks) for finding in answer.findings} == {
        ("compute", (2 * slow_stage + place,)) for place in range(2)
    }


def test_the_slowdown_is_near_the_publishers(folder: Path) -> None:
    stamps = stamps_of_trace(read([folder / "trace-ST.parquet"]))
    steps = np.unique(stamps[0].records["step"]).astype(np.int64)
    begins_ns = np.ones(len(stamps), np.int64)
    measures = measured(stamps, np.zeros((len(steps), len(stamps)), np.int64), begins_ns, steps)
    uneven_us = measures.compute_us - measures.compute_us.mean(axis=1, keepdims=True)
    slowdowns = []
    for row in range(5, 15):
        less_us = np.zeros_like(uneven_us)
        less_us[row] = uneven_us[row]
        gain_us = step_gain_us(stamps, begins_ns, steps, less_us, is_input=False)
        assert gain_us is not None
        slowdowns.append(measures.length_us[row] / (measures.length_us[row] - gain_us))
    published = json.loads((folder / "result-ST.json").read_text())["blocking_slowdown"]
    assert np.median(slowdowns) == pytest.approx(published, abs=0.035)  # 1.146 and 1.179
