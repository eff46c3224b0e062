"""A described job on real ranks: blocks are timed, plans run beside the described setting and calibrate; or ranks are paced."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.collect.tables.parallel_times import ParallelTimes
from dpro_search.kinds import described_job, job_of, load_source
from dpro_search.space.plan import Plan

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
]

TRAIN = Path(__file__).parents[2] / "experiments" / "parallel" / "train.py"
CONFIG = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
RANKS = 2
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A job of two hosts, with recorded times."""
    path = tmp_path_factory.mktemp("job")
    (path / "config.json").write_text(json.dumps(CONFIG))
    lines = ['model = "config.json"', f'cluster = "{RANKS}xtestbed@2gbit"', "global_batch = 8", "sequence = 32"]
    lines += ['precision = "fp32"', 'framework = "pytorch-gloo"', 'times = "times.json"', "[runs]", "micro_batch = 2"]
    (path / "job.toml").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def command(folder, torch_python):
    return [torch_python, "-W", "ignore", str(TRAIN), str(folder / "config.json"), str(STEPS)]


@pytest.fixture(scope="module")
def times(folder, command):
    """Recorded times of the described setting and of tensor parallelism."""
    plans = ("--plan", "zero_stage=0", "--plan", "tp=2,sequence_parallel=false")
    verb(
        "fit", folder / "job.toml", "--collect", "parallel", "--out", folder / "times.json", "--command", " ".join(command), *plans
    )
    return ParallelTimes.load(folder / "times.json")


def verb(*words, ok=True):
    done = subprocess.run(
        [sys.executable, "-m", "dpro_search.cli", *map(str, words)], capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode == 0) == ok, done.stderr[-2000:]
    return done


def test_blocks_and_exchanges_are_timed(times):
    assert {(row.block, row.tp) for row in times.blocks} == {(name, tp) for name in ("embedding", "layer", "head") for tp in (1, 2)}
    assert all(row.forward_us > 0 and row.backward_us > 0 for row in times.blocks)
    assert {row.collective for row in times.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "send_recv"}
    assert {(row.hosts, row.world, row.rate_bps) for row in times.collectives} == {(2, RANKS, 2e9)}
    by_size = {row.size_bytes: row.us for row in times.collectives if row.collective == "all_reduce"}
    assert by_size[1 << 22] > (1 << 22) / (2e9 / 8e6)  # no faster than the link


@pytest.fixture(scope="module")
def run(folder, times):
    verb("run", folder / "job.toml", "--trials", 20, "--out", folder / "run")
    return folder / "run"


def test_plans_run_beside_the_described_setting_with_its_losses(run, command):
    facts = json.loads(verb("validate", run, "--top", 2, "--warmup", 3, "--json", "--", *command).stdout)
    assert not facts["paced"]
    assert facts["failed"] == []
    assert len(facts["plans"]) == 2
    for row in facts["plans"]:
        assert row["losses"]["verdict"] == "same"
        assert row["losses"]["compared"] == STEPS
        assert row["measured_us"] > 0
        assert row["interval_us"][0] <= row["predicted_us"] <= row["interval_us"][1]
    calibrated = verb("run", run.parent / "job.toml", "--trials", 20, "--calibrate", run, "--out", run.parent / "again")
    assert "changes the prediction of the recorded setting by" in calibrated.stderr


def test_paced_runs_say_so_wait_for_recorded_times_and_compare_no_losses(run, times, command):
    facts = json.loads(verb("validate", run, "--top", 1, "--warmup", 3, "--paced", "--json", "--", *command).stdout)
    assert facts["paced"]
    (row,) = facts["plans"]
    assert row["losses"]["verdict"] == "unknown"
    layer = next(block for block in times.blocks if (block.block, block.tp) == ("layer", 1))
    micro_batches = 8 // RANKS // 2
    assert facts["baseline_us"] > micro_batches * CONFIG["n_layer"] * (layer.forward_us + layer.backward_us)

    split = facts["baseline_split"]
    assert split["measured"]["step_us"] > 0
    assert split["points"]["bubble"] == pytest.approx((split["predicted"]["bubble"] - split["measured"]["bubble"]) * 100)
    assert row["split"].keys() == split.keys()


@pytest.mark.parametrize(
    ("settings", "exchanged"),
    [
        ({"pp": 2}, {"pp send", "pp recv", "world all_reduce"}),
        ({"tp": 2, "sequence_parallel": False}, {"tp all_reduce"}),
        ({"zero_stage": 3}, {"dp all_gather", "dp reduce_scatter"}),
    ],
)
def test_the_time_of_a_paced_step_is_split_into_parts_that_add_up_to_it(folder, times, command, settings, exchanged):
    source = load_source(folder / "job.toml")
    ran = described_job(source, job_of(source), folder, command, paced=True).run(Plan.of(**settings), warmup=3, timeout_s=300)
    measured, predicted = ran.split.measured, ran.split.predicted
    for shares in (measured, predicted):
        assert shares.compute + shares.bubble + shares.exposed_communication == pytest.approx(1.0)
        assert sum(shares.by_axis.values()) == pytest.approx(shares.exposed_communication)
    assert measured.step_us == pytest.approx(ran.times.iteration_us.mean(), rel=0.03)
    assert (measured.bubble > 0) == (predicted.bubble > 1e-6) == ("pp" in settings)
    assert exchanged <= measured.by_exchange.keys()
    assert "other" not in measured.by_axis
    recorded_us = (measured.compute - measured.beyond_recorded) * measured.step_us
    assert recorded_us == pytest.approx(predicted.compute * predicted.step_us, rel=0.15)  # drawn pass by pass


def test_a_script_that_does_not_use_the_plan_is_refused_with_the_line_that_it_lacks(run, torch_python, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('nothing')\n")
    refusal = verb("validate", run, "--", torch_python, str(script), ok=False).stderr
    assert "its script does not use parallel_plan.py (planned = apply(model, loss_function))" in refusal
