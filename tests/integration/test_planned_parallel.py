"""A small GPT that follows exported plans on real ranks: losses of the whole model, and the collectives of the plan."""

import json
import subprocess
from pathlib import Path

import pytest

from dpro_search.deploy.export import export_plan
from dpro_search.deploy.targets import targets_named
from dpro_search.kinds import job_of, kind_of, load_source
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("planned_parallel_job.py")
LAYERS = 4
CONFIG = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 16,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
TWO = {
    "ddp": {"zero_stage": 0},
    "ddp, micro-batches": {"zero_stage": 0, "micro_batch": 2},
    "zero 1": {"zero_stage": 1, "micro_batch": 2},
    "zero 2": {"zero_stage": 2, "micro_batch": 2},
    "fsdp": {"zero_stage": 3, "micro_batch": 4},
    "fsdp, recomputed": {"zero_stage": 3, "micro_batch": 4, "recompute": "full"},
    "tp": {"tp": 2, "sequence_parallel": False, "micro_batch": 8},
    "tp, sp": {"tp": 2, "sequence_parallel": True, "micro_batch": 8},
    "1f1b": {"pp": 2, "micro_batch": 2},
    "interleaved": {"pp": 2, "virtual_stages": 2, "micro_batch": 2},
}
FOUR = {
    "tp x pp": {"tp": 2, "pp": 2, "micro_batch": 2, "sequence_parallel": False},
    "tp, sp x pp": {"tp": 2, "pp": 2, "micro_batch": 2, "sequence_parallel": True},
    "fsdp x tp, sp": {"tp": 2, "zero_stage": 3, "micro_batch": 4},
    "zero 1 x pp": {"pp": 2, "zero_stage": 1, "micro_batch": 1},
}


@pytest.fixture(scope="module")
def found(torch_python, tmp_path_factory):
    """What rank 0 reports of each case."""
    results = {}
    for ranks, cases in ((2, TWO), (4, FOUR)):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        plans = [None, *(exported(folder / str(number), ranks, settings) for number, settings in enumerate(cases.values()))]
        (folder / "cases.json").write_text(json.dumps(plans))
        out = folder / "out.json"
        command = [torch_python, "-W", "ignore", str(JOB), str(folder / "cases.json"), str(out)]
        jobs = [
            subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(ranks)
        ]
        try:
            said = [job.communicate(timeout=240)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        assert out.exists(), "\n".join(text[-1500:] for text in said)
        results |= zip([ranks, *cases], json.loads(out.read_text()), strict=True)
    return results


def exported(folder, ranks, settings):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / "job.toml"
    text = f'model = "config.json"\ncluster = "{ranks}xh100"\nglobal_batch = 8\nsequence = 16\nprecision = "fp32"\n'
    path.write_text(f'{text}framework = "pytorch"\n[runs]\n')
    source = load_source(path)
    kind = kind_of(source)
    facts = kind.facts(source)
    facts = facts.__class__(**{**vars(facts), "workload": job_of(source).job.workload(Scenario())})
    export_plan(Plan.of(**settings), folder / "plan", targets_named(["pytorch"], kind.targets), facts)
    return str(folder / "plan")


@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_losses_and_gradients_are_those_of_the_whole_model(found, case):
    whole = found[2]
    assert found[case]["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert found[case]["norms"] == pytest.approx(whole["norms"], rel=1e-4)
    assert whole["losses"][-1] < whole["losses"][0]


UNITS = LAYERS + 3  # that FSDP shards: two embeddings, layers, norm and head together
LOSS = 3  # sums of a loss over a split vocabulary: maxima, exponentials, targets
NORMS = 2 * (2 * LAYERS + 1)  # weights and biases
SEQUENCE_PARALLEL = {
    # of each layer two in the forward and two in the backward pass; of the embedding, the positions' gradient, the head
    "all_gather_into_tensor 2": 4 * LAYERS + 1 + 1 + 1,
    "reduce_scatter_tensor 2": 4 * LAYERS + 1 + 1,
    "all_reduce 2": LOSS + NORMS,
}
# The last unit is not freed before its backward pass.
SHARDED = {"allgather_base 2": UNITS + UNITS - 1, "reduce_scatter_base 2": UNITS}
EXPECTED = {
    "ddp": {"allreduce 2": UNITS},
    "ddp, micro-batches": {"allreduce 2": UNITS},
    "fsdp": SHARDED,
    "fsdp, recomputed": SHARDED,
    "tp": {"all_reduce 2": 4 * LAYERS + 2 + LOSS},
    "tp, sp": SEQUENCE_PARALLEL,
    "fsdp x tp, sp": {**SEQUENCE_PARALLEL, **SHARDED},
    "1f1b": {"send 2": 4, "recv 2": 4},  # four micro-batches, and their gradients
}


@pytest.mark.parametrize("case", EXPECTED)
def test_collectives_are_those_of_the_plan(found, case):
    assert found[case]["collectives"] == EXPECTED[case]


@pytest.mark.parametrize("case", ["tp", "tp, sp", "fsdp x tp, sp"])
def test_no_whole_matrix_stays_in_memory_when_it_is_split(found, case):
    assert found[case]["whole"] == []


def test_zero_1_reduces_once_and_zero_2_each_micro_batch(found):
    one, two = (found[f"zero {stage}"]["collectives"] for stage in (1, 2))
    assert (one["reduce_scatter_base 2"], two["reduce_scatter_base 2"]) == (UNITS, 2 * UNITS)
    assert one["allgather_base 2"] == two["allgather_base 2"] == UNITS + 1  # PyTorch gathers one of them again


def test_a_pipeline_of_sharded_stages_reduces_once(found):
    units = LAYERS // 2 + 2  # of the first stage
    collectives = found["zero 1 x pp"]["collectives"]
    assert (collectives["allgather_base 2"], collectives["reduce_scatter_base 2"]) == (units, units)
