"""The page of a parallel job: one breakdown, the described setting beside the best plan, the pipeline, the memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report.test_page import Outline

from dpro_search.kinds import STEP_PARTS, job_of, load_source
from dpro_search.report import render, units
from dpro_search.report.charts import PipelineRow, pipeline
from dpro_search.report.gathered import facts_of_source
from dpro_search.report.html import to_text
from dpro_search.space.plan import Plan
from tests.in_process import dpro

JOB = """\
model = "llama3-8b"
cluster = "2xhgx-h100"
global_batch = 64
sequence = 2048
[runs]
tp = 2
pp = 4
micro_batch = 1
recompute = "full"
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("described") / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def page(job) -> Outline:
    return Outline(render(facts_of_source(job)))


def test_the_title_names_the_model_the_cluster_and_the_batch(page):
    header = page.text.split("Where a step goes")[0]
    assert "llama3-8b on 2 x HGX H100" in header
    assert "64 sequences of 2048 tokens" in header


def test_the_parts_of_the_page_are_those_of_replay_and_add_up_to_the_step(job):
    source = job_of(load_source(job))
    (setting,), replayed = facts_of_source(job).settings, source.replayed(Plan())
    assert setting.parts_us.keys() <= STEP_PARTS.keys()
    assert sum(setting.parts_us.values()) == pytest.approx(replayed.iteration_us)
    computed = {name: us for name, us in setting.parts_us.items() if name not in replayed.breakdown_us}
    assert sum(computed.values()) == pytest.approx(replayed.breakdown_us["compute"])
    assert {"attention", "mlp", "norms", "recomputation"} <= computed.keys()
    assert computed["mlp"] > computed["attention"] > computed["norms"] > 0
    assert setting.parts_us["exposed_tensor_parallel"] == replayed.breakdown_us["exposed_tensor_parallel"]


def test_the_page_says_one_thing_about_communication(page, job):
    (setting,) = facts_of_source(job).settings
    text, us = page.text, setting.parts_us["exposed_tensor_parallel"]
    assert f"{units.duration(us)} ({us / setting.step_us * 100:.1f} %)" in text
    assert "tensor parallel communication (tp)" in text
    assert "Critical path" not in text
    assert not re.search(r"\b[FB]\d+ of stage", text)


def test_every_stage_of_the_pipeline_is_drawn_with_its_passes(page):
    rows = [svg["aria-label"] for svg in page.named("svg") if (svg.get("aria-label") or "").startswith("stage ")]
    assert len(rows) == 4
    assert all(re.fullmatch(r"stage \d: busy \d+\.\d %", row) for row in rows)
    assert "bubble" in page.text


def test_memory_is_listed_by_purpose_with_what_is_free(page, job):
    (setting,) = facts_of_source(job).settings
    assert setting.peak_bytes == pytest.approx(job_of(load_source(job)).predict(Plan()).peak_memory_bytes, rel=1e-6)
    for purpose in ("parameters", "gradients", "optimizer state", "activations"):
        assert purpose in page.text
    assert re.search(r"\d+\.\d GiB, \d+\.\d GiB of 79\.6 GiB free", page.text)


def test_a_search_shows_the_described_setting_beside_the_best_plan(job, tmp_path):
    assert dpro("run", job, "--quiet", "--out", tmp_path / "run").returncode == 0
    assert dpro("report", tmp_path / "run", "--out", tmp_path / "page.html").returncode == 0
    page = Outline((tmp_path / "page.html").read_text("utf-8"))
    assert "The described setting and the best plan" in page.text
    for name in ("tokens a second", "MFU", "tensor parallel (tp)", "pipeline stages (pp)"):
        assert name in page.text
    columns = [attributes["data-label"] for attributes in page.named("td") if "data-label" in attributes]
    assert "as described" in columns
    assert "plan 1" in columns
    assert not re.search(r"\d{4,}(\.\d)? ms\b", page.text)


def test_critical_ops_of_a_pipeline_are_passes_of_stages(job):
    names = [row.op for row in job_of(load_source(job)).diagnose().critical_ops]
    assert len(set(names)) == len(names)
    assert "backward passes of stage 0" in names
    assert not any(re.search(r"\b[FB]\d", name) for name in names)


def test_diagnose_has_the_parts_of_the_page(job):
    source = job_of(load_source(job))
    rows = source.diagnose().tables[0].rows
    assert {"attention", "MLP", "recomputation of activations", "tensor parallel communication (tp)"} <= {row[0] for row in rows}


def test_spans_that_touch_are_drawn_as_one():
    row = PipelineRow(name="stage 0", value="", spans={"forward": [(0.0, 10.0), (10.0, 20.0), (50.0, 100.0)]})
    text = to_text(pipeline("Pipeline", [row], 100.0))
    assert 'd="M0 0h2000v1h-2000zM5000 0h5000v1h-5000z"' in text


def test_a_search_lists_plans_with_what_they_yield_need_and_cost(job, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB.split("[runs]")[0])
    assert dpro("run", path, "--quiet", "--out", tmp_path / "run").returncode == 0
    assert dpro("report", tmp_path / "run", "--out", tmp_path / "page.html").returncode == 0
    page = Outline((tmp_path / "page.html").read_text("utf-8"))
    assert "the usual plan" in page.text.split("Best plans")[1], "without [runs], the headline compares with a usual plan"
    columns = {attributes["data-label"] for attributes in page.named("td") if "data-label" in attributes}
    assert {"predicted", "interval", "tokens a second", "MFU", "peak memory"} <= columns
    front = page.text.split("Plans on the front")[-1].split("How far to trust")[0]
    assert "as recorded" not in page.text
    assert "The usual plan and the best plan" in page.text
    assert "as described" not in page.text
    assert re.search(r"tp \d+, .*micro-batch \d+", front)
