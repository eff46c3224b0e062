"""``experiments.truth compare``: predictors side by side on the same rows, and peers in an environment of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.model import model, parameters_of, published
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import Workload
from experiments.truth import __main__ as truth_main
from experiments.truth.peers import described
from tests.in_process import called

ROOT = Path(__file__).parents[2]
HEAD = (
    "source,gpu,gpus_per_node,n_gpus,model,layers,hidden,heads,kv_heads,ffn_hidden,vocab,seq_len,precision,dp,tp,pp,micro_batch,"
    "global_batch,framework,status,step_time_s,tier"
)
RUN = "one,{gpu},8,8,llama,32,4096,32,8,14336,128256,4096,bf16,8,1,1,1,64,NeMo,ok,4,A"


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs.csv").write_text(
        "\n".join([HEAD, RUN.format(gpu="H100"), RUN.format(gpu="L40S"), RUN.format(gpu="K80")]) + "\n"
    )
    return tmp_path


def truth(*options, envs):
    return called(truth_main, *options, DPRO_SEARCH_ENVS=str(envs))


def test_predictors_are_compared_on_the_rows_that_all_support(runs):
    done = truth("compare", runs, "--predictor", "cold,constant-mfu", "--json", envs=runs)
    facts = json.loads(done.stdout)
    assert facts["rows"] == 2
    assert {name: figures["all"]["rows"] for name, figures in facts["predictors"].items()} == {"cold": 2, "constant-mfu": 2}
    assert facts["alone"]["cold"]["left_out"] == [{"reason": "no bundled machine or device has the GPU K80", "rows": 1}]


def test_a_peer_that_is_not_installed_is_one_line(runs):
    done = truth("score", runs, "--predictor", "mlsysim", envs=runs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "scripts/make_env.sh peers" in done.stderr


def test_a_predictor_that_nobody_knows_is_one_line(runs):
    done = truth("score", runs, "--predictor", "oracle", envs=runs)
    assert done.returncode == 2
    assert "no predictor oracle: choose from cold" in done.stderr


def test_a_script_answers_every_job_and_says_why_it_cannot(tmp_path):
    """What the package prints does not get between the answers."""
    (tmp_path / "peer.py").write_text(
        "from answers import answer\n"
        "def step(job):\n"
        "    print('noise')\n"
        "    if job['hidden'] > 1: raise ValueError('too wide')\n"
        "    return {'step_s': 2.0}\n"
        "answer(step)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "experiments" / "truth" / "peers")}
    jobs = '{"hidden": 1}\n{"hidden": 2}\n{"hidden": 1}\n'
    done = subprocess.run(
        [sys.executable, str(tmp_path / "peer.py")], input=jobs, env=environment, capture_output=True, text=True, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"step_s": 2.0},
        {"error": "ValueError: too wide"},
        {"step_s": 2.0},
    ]


def workload(name, **degrees):
    return Workload(model=published(name), sequence=4096, strategy=Strategy(**degrees), cluster=parse_cluster("2xhgx-h100"))


def test_a_job_is_described_by_its_numbers():
    description = described(workload("mixtral-8x7b", dp=16, global_batch=64))
    assert json.loads(json.dumps(description)) == description
    assert (description["devices"], description["hosts"], description["experts"], description["micro_batches"]) == (16, 2, 8, 4)
    assert description["host_bytes_per_s"] == 450e9
    assert description["nic_bits_per_s"] == 400e9
    assert parameters_of(published("mixtral-8x7b")) == description["parameters"]
    assert description["active_parameters"] == pytest.approx(12.9e9, rel=0.01)  # Jiang et al. 2024, arXiv 2401.04088


def test_networks_that_are_no_transformers_are_left_out():
    job = Workload(model=model("resnet50"), sequence=1, strategy=Strategy(dp=8, global_batch=8), cluster=parse_cluster("hgx-h100"))
    with pytest.raises(InputError, match="no transformer"):
        described(job)


def test_layers_that_differ_are_left_out():
    with pytest.raises(InputError, match="layers that differ"):
        described(workload("deepseek-v3"))
