"""A captured model as a job: what job.toml says, plans that it takes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dpro_search.collect.capture import read_graph
from dpro_search.errors import InputError
from dpro_search.kinds import captured_text, job_of, load_source
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.kinds.verbs import refusal

CAPTURED = Path(__file__).parents[1] / "data" / "captured" / "llama.json"


@pytest.fixture
def path(tmp_path):
    shutil.copy(CAPTURED, tmp_path / "graph.json")
    file = tmp_path / "job.toml"
    file.write_text(captured_text(read_graph(CAPTURED), "graph.json", "8xh100").replace("global_batch = 16", "global_batch = 64"))
    return file


def test_the_written_file_describes_a_job(path):
    source = load_source(path)
    assert source.files["capture"] == path.with_name("graph.json")
    prediction = job_of(source).predict(Plan())
    assert prediction.infeasible is None
    assert prediction.iteration_us > 0


def test_a_captured_job_runs_on_any_cluster_with_the_captured_batch_on_each_replica(tmp_path):
    """``dpro-search capture`` without a cluster, then ``run --cluster``: 64 replicas have 64 times the captured batch."""
    graph = read_graph(CAPTURED)
    shutil.copy(CAPTURED, tmp_path / "graph.json")
    (tmp_path / "job.toml").write_text(captured_text(graph, "graph.json", None))
    job, _ = job_of(load_source(tmp_path / "job.toml")).under(Scenario().on("8xhgx-h100"))
    assert job.work.tokens == graph.batch * graph.micro_batches * 64 * graph.sequence
    assert "each replica has a batch of" in " ".join(job.assumptions)
    assert next(iter(job.objective().ranked())).least_us > 0


@pytest.mark.parametrize(
    "plan", [{"tp": 2}, {"pp": 3, "dp": 1, "tp": 1}, {"zero_stage": 3}, {"recompute": "full"}, {"micro_batch": 4}]
)
def test_plans_change_the_step(path, plan):
    text = path.read_text()
    if "pp" in plan:
        path.write_text(text.replace("8xh100", "3xh100").replace("global_batch = 64", "global_batch = 48"))
    job = job_of(load_source(path))
    assert job.predict(Plan.of(**plan)).iteration_us != job.predict(Plan()).iteration_us


def test_splitting_saves_memory(path):
    job = job_of(load_source(path))
    today, sharded = (job.predict(plan).peak_memory_bytes for plan in (Plan(), Plan.of(zero_stage=3)))
    assert sharded < today


def test_all_proposed_strategies_are_legal(path):
    strategies = list(job_of(load_source(path)).space.candidates)
    assert {strategy.tp for strategy in strategies} == {1, 2, 4}
    assert {strategy.ep for strategy in strategies} == {1}


@pytest.mark.parametrize(
    ("plan", "said"),
    [({"ep": 2}, "its experts are not known"), ({"tp": 8}, "tp 8 does not divide heads of keys and values of Llama, 4")],
)
def test_what_cannot_be_split_is_refused_with_the_reason(path, plan, said):
    with pytest.raises(InputError, match=said):
        job_of(load_source(path)).predict(Plan.of(**plan))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'precision = "bf16"',
            'precision = "fp16"',
            "precision: graph.json was captured in bf16; capture it with --precision fp16",
        ),
        ('capture = "graph.json"', 'capture = "none.json"', "model.capture: "),
        ('capture = "graph.json"', 'capture = "graph.json"\nsizes = 1', "model.sizes: unknown key"),
        ("sequence = 64 ", "# ", "'sequence' is missing"),
    ],
)
def test_an_error_names_file_and_key(path, old, new, said):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    line = refusal("replay", path)
    assert str(path) in line
    assert said in line
