"""Experts whose tokens travel beside the computation of another micro-batch."""

from __future__ import annotations

import pytest

from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal
from tests.parallel.jobs import job, prepared, text

JOB = {"model": "qwen3-30b-a3b", "cluster": "2xhgx-h100", "sequence": 4096, "global_batch": 64}


def test_exchanges_are_waited_for_only_where_they_take_longer_than_the_computation(tmp_path):
    """Experts on the devices of one host, and of two."""

    def waited(ep):
        alone, beside = (
            job(tmp_path, f"ep = {ep}\nmicro_batch = 1\noverlap_experts = {overlap}", **JOB).predict(Plan()).iteration_us
            for overlap in ("false", "true")
        )
        return alone, beside

    for alone, beside in (waited(8), waited(16)):
        assert 0.5 * alone < beside < 0.97 * alone


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ("tp = 1", "no tokens are exchanged"),
        ("ep = 8\nmicro_batch = 4", "there is one"),
        ("ep = 8\nmicro_batch = 1\nrecompute = 'full'", "recompute full"),
        ("ep = 8\npp = 2\nmicro_batch = 1", "virtual_stages above 1"),
    ],
)
def test_what_megatron_refuses_is_refused_with_its_reason(tmp_path, runs, reason):
    (tmp_path / "job.toml").write_text(text(runs + "\noverlap_experts = true", **JOB))
    assert reason in refusal("replay", tmp_path / "job.toml")


def test_a_search_overlaps_where_it_can_if_the_job_does_today(tmp_path):
    today = job(tmp_path, "ep = 8\nmicro_batch = 1\noverlap_experts = true", **JOB)
    candidates = list(prepared(today).space.candidates)
    assert {each.overlap_experts for each in candidates if each.ep == 1} == {False}
    possible = [each for each in candidates if each.ep > 1 and each.pp == 1 and each.micro_batches > 1]
    assert {each.overlap_experts for each in possible if each.recompute.value != "full"} == {True}
    assert not any(each.overlap_experts and each.recompute.value == "full" for each in candidates)
