"""`diagnose` and `run` ask the same questions of a job: a search finds at least what a diagnosis shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro_search.kinds import job_of, load_source
from tests.kinds.verbs import verb
from tests.recordings import DATA, trace_of

RECORDINGS = ("ddp_mlp", "ddp_blocks", "fsdp_mlp", "kvstore_mlp", "byteps_mlp", "mxnet_horovod_mlp")
PROFILES = ("ddp_resnet50_h200.json.gz",)


@pytest.fixture(params=(*RECORDINGS, *PROFILES))
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "T"
    if request.param in PROFILES:
        verb("import", DATA / request.param, "--out", folder)
    else:
        trace_of(request.param).save(folder)
    return folder


def test_a_search_is_at_least_as_good_as_what_a_diagnosis_shows(trace: Path, tmp_path: Path) -> None:
    job = job_of(load_source(trace))
    legal = {text for text, plan in job.job.questions(job.scenario).items() if job.space.refusal(plan) is None}
    assert legal, "the kind asks nothing"
    shown_us = [row["predicted_iteration_us"] for row in verb("diagnose", trace)["gains"] if row["what_if"] in legal]
    verb("run", trace, "--trials", 20, "--out", tmp_path / "run")
    tried = [json.loads(line) for line in (tmp_path / "run" / "trials.jsonl").read_text().splitlines()]
    assert min(trial["prediction"]["iteration_us"] for trial in tried) <= min(shown_us) * 1.01


def test_views_of_buckets_are_tried_for_recorded_ddp(tmp_path: Path) -> None:
    trace_of("ddp_mlp").save(tmp_path / "T")
    verb("run", tmp_path / "T", "--trials", 40, "--out", tmp_path / "run")
    assert "gradient_as_bucket_view" in (tmp_path / "run" / "trials.jsonl").read_text()
