"""Reports of imported GPU traces: how much work they take, and what they show."""

from __future__ import annotations

from pathlib import Path

import pytest
from kineto_machine import Launch, Synchronize, run

from dpro_search.cli._report_facts import facts_of_trace
from dpro_search.collect.readers.kineto import read
from dpro_search.kinds.imported import recorded

STEPS = 20


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    profile, _ = run([Launch("gemm", 10, 400), Launch("relu", 10, 100), Synchronize(50)], STEPS)
    read([profile.write(folder / "profile.json")]).save(folder / "T")
    return folder / "T"


def test_a_report_makes_ops_once_and_replays_each_step_once(trace, monkeypatch):
    calls = {"recorded_ops": 0, "replay": 0}

    def counted(name):
        real = getattr(recorded, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(recorded, name, counted(name))
    facts = facts_of_trace(trace)
    assert len(facts.held_out) == 6
    assert calls["recorded_ops"] == 1
    assert calls["replay"] <= STEPS + 2 * (len(facts.held_out) + 2), "each step, and for each prediction the one with the breakdown"
