"""All plans of a described job on the page: which are priced, what is packed, and that what it says is what `replay` says."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from report.test_page import Outline
from report.test_parallel import JOB

from dpro_search.kinds import STEP_PARTS, job_of, load_source
from dpro_search.parallel.answers.priced import drawn_micro_batches, order_texts, priced_plans
from dpro_search.parallel.job import ParallelJob
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.search.changes import change_text
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.strategy import Strategy
from dpro_search.report import render
from dpro_search.report.gathered import facts_of_run
from dpro_search.report.planner import Planner, planner_data, planner_section
from dpro_search.space.plan import Plan
from tests.in_process import dpro

PLANS = 80


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    (folder / "job.toml").write_text(JOB)
    assert dpro("run", folder / "job.toml", "--quiet", "--out", folder / "run").returncode == 0
    return folder / "run"


@pytest.fixture(scope="module")
def facts(run):
    return facts_of_run(run, None, least_plans=PLANS)


@pytest.fixture(scope="module")
def planner(facts) -> Planner:
    return facts.planner


def test_every_plan_of_the_search_is_there_and_others_fill_up(run, planner):
    trials = [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]
    searched = [one for one in planner.plans if one.origin == "search"]
    assert len(planner.plans) == PLANS
    assert {one.prediction.iteration_us for one in searched} == {trial["prediction"]["iteration_us"] for trial in trials}
    assert Counter(one.origin for one in planner.plans).keys() == {"search", "change", "sample"}
    assert len({one.strategy for one in planner.plans}) == PLANS


def test_times_memory_and_parts_are_those_of_replay(run, planner):
    here = job_of(load_source(run.parent / "job.toml"))
    for one in planner.plans[::7]:
        replayed = here.replayed(one.plan)
        assert one.prediction.iteration_us == pytest.approx(replayed.iteration_us, rel=1e-9)
        assert sum(one.memory_bytes.values()) == pytest.approx(replayed.peak_memory_bytes, rel=1e-6)
        assert sum(one.parts_us.values()) == pytest.approx(replayed.iteration_us)
        assert one.parts_us.keys() <= STEP_PARTS.keys()


def test_drawn_plans_have_all_degrees_and_are_the_same_each_time(planner, run):
    here = job_of(load_source(run.parent / "job.toml"))
    job = here.job
    assert isinstance(job, ParallelJob)
    candidates = job.prepared(here.scenario).space.candidates
    shapes = sum(1 for _ in candidates.shapes())
    again = [[next(drawn) for _ in range(shapes)] for drawn in (candidates.drawn(np.random.default_rng(0)) for _ in range(2))]
    assert again[0] == again[1]
    degrees = {(one.tp, one.pp, one.cp, one.micro_batch) for one in candidates.shapes()}
    assert {(one.tp, one.pp, one.cp, one.micro_batch) for one in again[0]} == degrees
    assert {*again[0]} <= {*candidates}


def test_columns_unpack_to_the_plans(planner):
    data = planner_data(planner)
    steps_us = np.frombuffer(base64.b64decode(data["step_us"]), "<f8")
    assert steps_us.tolist() == [one.prediction.iteration_us for one in planner.plans]
    for setting in data["settings"]:
        column = np.frombuffer(base64.b64decode(setting["column"]), "<u2")
        values = [setting["values"][place] for place in column]
        assert values == [getattr(one.strategy, setting["name"]) for one in planner.plans], setting["name"]
    named = np.frombuffer(base64.b64decode(data["named"]), "<u4")
    names = [setting["name"] for setting in data["settings"]]
    assert [{name for bit, name in enumerate(names) if bits >> bit & 1} for bits in named.tolist()] == [
        {*one.plan.settings} for one in planner.plans
    ]
    assert planner.plans[data["baseline"]].plan == Plan()
    assert planner.plans[data["best"]].plan == planner.best


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        (Schedule.GPIPE, 1),
        (Schedule.ONE_F_ONE_B, 1),
        (Schedule.INTERLEAVED, 3),
        (Schedule.ZERO_BUBBLE, 1),
        (Schedule.ZERO_BUBBLE_V, 2),
        (Schedule.DUAL_PIPE_V, 2),
        (Schedule.DUAL_PIPE, 1),
    ],
)
def test_letters_tell_the_order_of_passes(schedule, stages):
    """Micro-batches are left out of the letters, which is right if each stage takes them in their order."""
    strategy = Strategy(pp=4, schedule=schedule, virtual_stages=stages, global_batch=64)
    assert drawn_micro_batches(strategy) == 12
    for text, order in zip(order_texts(strategy), pipeline_orders(schedule, 4, stages, 12), strict=True):
        assert len(text) == len(order)
        numbers = Counter()
        for one in order:
            for part in ("I", "W") if one.direction == "B" else (one.direction,):
                assert one.micro_batch == numbers[one.stage, part]
                numbers[one.stage, part] += 1


def test_without_a_script_the_fastest_plans_that_fit_are_a_table(planner):
    page = Outline(str(planner_section(planner).__html__()))
    fitting = [one for one in planner.plans if one.prediction.infeasible is None]
    limit = planner.searched_bytes
    assert limit is not None
    fastest = next(one for one in fitting if (one.prediction.peak_memory_bytes or 0) <= limit)
    assert fastest.text in page.text
    assert "best plan" in page.text


def test_the_page_draws_the_front_once(facts):
    text = render(facts)
    assert 'id="planner-canvas"' in text
    assert "Step time against peak memory;" not in text
    assert "Plans on the front" in text


def test_a_limit_of_the_search_holds_for_further_plans(run, tmp_path):
    job = run.parent / "job.toml"
    assert dpro("run", job, "--quiet", "--memory-limit", "40GiB", "--out", tmp_path / "run").returncode == 0
    planner = facts_of_run(tmp_path / "run", None, least_plans=40).planner
    assert planner is not None
    assert planner.limit_bytes == 40 * 2**30
    for one in planner.plans:
        assert (one.prediction.infeasible is None) == ((one.prediction.peak_memory_bytes or 0) <= 40 * 2**30)


def test_the_line_of_a_plan_names_the_cluster_and_the_changes_of_its_search(run, tmp_path):
    words = ("--cluster", "4xhgx-h100", "--set", "compute=0.9", "--set", "tp=4")
    assert dpro("run", run.parent / "job.toml", "--quiet", "--trials", "4", "--out", tmp_path / "run", *words).returncode == 0
    planner = facts_of_run(tmp_path / "run", None, least_plans=12).planner
    assert planner is not None
    assert planner.command[-6:] == [*words]
    for one in planner.plans[::3]:
        plan = ["--set", change_text(one.plan.settings)] if one.plan.settings else []
        answer = dpro(*planner.command[1:], *plan, "--json")
        assert json.loads(answer.stdout)["predicted_iteration_us"] == pytest.approx(one.prediction.iteration_us, rel=1e-9)


def test_the_option_says_how_many_plans(run, tmp_path):
    assert dpro("report", run, "--plans", "45", "--out", tmp_path / "page.html").returncode == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    assert json.loads(text.split('id="planner-data">')[1].split("</script>")[0])["count"] == 45


def test_nothing_is_priced_beyond_what_is_asked_for(run):
    """Plans of the search alone: nothing else is priced where the search has as many as are asked for."""
    here = job_of(load_source(run.parent / "job.toml"))
    prediction = here.predict(Plan())
    (one,) = priced_plans(here, [(Plan(), prediction)], [Plan()], 1)
    assert (one.plan, one.origin, one.prediction) == (Plan(), "search", prediction)
