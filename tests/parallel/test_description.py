"""job.toml: what it says, what follows, and one line with file, line and key for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpro_search.kinds import Wanted, describable_names, description_text, job_of, load_source
from dpro_search.parallel import NETWORKS, names
from dpro_search.parallel.steps.step_prices import step_costs
from dpro_search.space.plan import Plan
from tests.every_case import every_case
from tests.kinds.verbs import printed, refusal, verb
from tests.parallel.jobs import job, text


def described(folder: Path, content: str):
    path = folder / "job.toml"
    path.write_text(content)
    return load_source(path)


def test_dp_follows_from_the_devices(tmp_path):
    strategy = described(tmp_path, text("tp = 4\npp = 2")).strategy
    assert (strategy.dp, strategy.tp, strategy.pp, strategy.devices) == (2, 4, 2, 16)


def test_embeddings_are_tied_as_the_file_says(tmp_path):
    """A head of its own has 128,256 x 4,096 parameters more: 16 bytes of each, less what ZeRO-1 splits."""
    tied, apart = (job(tmp_path, "tp = 1", tied_embeddings=tied).predict(Plan()).peak_memory_bytes for tied in (True, False))
    assert apart - tied == pytest.approx(128_256 * 4_096 * (2 + 4 + 12 / 16), rel=0.1)
    assert described(tmp_path, text(tied_embeddings=False)).fixed.model == described(tmp_path, text()).fixed.model


def measured(block="layer", forward_us=6000, backward_us=9000, runs=None, **setup):
    """A description with times of a block."""
    head = text(None).replace('model = "llama3-8b"\n', "")
    values = {"block": f'"{block}"', "forward_us": forward_us, "backward_us": backward_us, **setup}
    times = "\n".join(f"{name} = {value}" for name, value in values.items())
    return f'{head}[model]\nname = "llama3-8b"\n[[model.times]]\n{times}\n' + (f"[runs]\n{runs}\n" if runs else "")


@pytest.mark.parametrize(
    ("runs", "setup"), [("tp = 1", {}), ("tp = 2", {"tp": 2}), ("tp = 2\nmicro_batch = 2", {"tp": 2, "micro_batch": 2})]
)
def test_passes_of_a_block_are_those_that_were_measured(tmp_path, runs, setup):
    description = described(tmp_path, measured(runs=runs, **setup))
    layer = step_costs(description.workload(description.strategy)).stages[0][1]
    assert (layer.forward_us, layer.backward_us) == (pytest.approx(6000), pytest.approx(9000))


def test_what_was_measured_holds_in_proportion_for_other_strategies(tmp_path):
    def layer(content):
        scaled = described(tmp_path, content)
        return step_costs(scaled.workload(scaled.strategy)).stages[0][1]

    one, two = (layer(text(f"tp = {tp}")) for tp in (1, 2))
    scaled = layer(measured(forward_us=2 * one.forward_us, backward_us=3 * one.backward_us, runs="tp = 2"))
    assert scaled.forward_us == pytest.approx(2 * two.forward_us)
    assert scaled.backward_us == pytest.approx(3 * two.backward_us)
    assert scaled.weights_us == pytest.approx(3 * two.weights_us)


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2), ("dual-pipe-v", 2), ("dual-pipe", 1)],
)
def test_pipelines_run_in_every_order(tmp_path, schedule, stages):
    """Of four ranks with sixteen micro-batches; none makes a step twice as long as 1F1B does."""
    runs = f'pp = 4\nvirtual_stages = {stages}\nschedule = "{schedule}"'
    assert described(tmp_path, text(runs)).strategy.schedule == schedule
    ordered_us, usual = (job(tmp_path, each).predict(Plan()).iteration_us for each in (runs, "pp = 4"))
    assert 0.5 * usual < ordered_us < 2 * usual


def test_a_schedule_that_the_framework_lacks_is_said(tmp_path):
    (tmp_path / "job.toml").write_text(text('pp = 4\nschedule = "zero-bubble"'))
    said = " ".join(verb("replay", tmp_path / "job.toml")["assumed"])
    assert "megatron-core has no schedule zero-bubble (it has 1f1b, interleaved): only its order is taken" in said


def test_what_is_not_set_is_as_the_framework_does_it(tmp_path):
    assert described(tmp_path, text("tp = 2")).strategy.zero_stage == 1
    assert described(tmp_path, text("tp = 1", framework="fsdp")).strategy.zero_stage == 3
    assert described(tmp_path, text("tp = 2")).strategy.sequence_parallel
    found = (described(tmp_path, text("tp = 2", framework=name)) for name in ("megatron-core", "fsdp"))
    megatron, pytorch = (each.workload(each.strategy).runtime for each in found)
    assert (megatron.regather_inputs, pytorch.regather_inputs) == (True, False)


def test_without_a_table_the_usual_strategy_fits_in_memory(tmp_path):
    opened_job = job(tmp_path, None, model="llama3-70b", cluster="8xhgx-h100")
    prediction = opened_job.predict(Plan())
    assert prediction.infeasible is None
    assert 0 < prediction.peak_memory_bytes < 80 * 2**30
    assert "was not given" in " ".join(verb("replay", tmp_path / "job.toml")["assumed"])


def test_a_config_of_hugging_face_beside_the_file_is_a_model(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 2816,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 32000}))
    description = described(tmp_path, text("tp = 8", model="config.json"))
    assert description.fixed.model.layer_count == 4
    assert description.files["model_config"] == tmp_path / "config.json"


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b'{"model_type": "\xff"}', b"[]", b"\x80\x04K\x01."])
def test_a_file_that_is_no_config_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "job.toml").write_text(text(model="config.json"))
    assert "config.json: not a config.json of a model" in refusal("replay", tmp_path / "job.toml")


def test_a_cluster_file_is_found_beside_the_description(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "hgx-h100"\nhosts = 4\n')
    assert described(tmp_path, text("tp = 2", cluster="mine.toml")).strategy.devices == 32
    assert described(tmp_path, text("tp = 2", cluster="2xmine.toml")).strategy.devices == 64


@every_case(
    ("content", "said"),
    [
        (text(model="lama3-8b"), ":4: model: model 'lama3-8b' is not known: did you mean llama3-8b"),
        (text() + "tpp = 1\n", ":7: runs.tpp: unknown key; did you mean 'tp'?"),
        ("globl_batch = 1\n" + text(), ":1: globl_batch: unknown key; did you mean 'global_batch'?"),
        (text(global_batch=float("nan")), ":4: global_batch: must be a whole number"),
        (text(sequence=-1), ":4: sequence: must be from 1 to 1e9, not -1"),
        (text("micro_batch = 3"), "global_batch 64 does not divide into dp 16 x micro_batch 3: use 48"),
        (text("tp = 3"), ":6: runs.tp: tp 3: tp 3 x pp 1 x cp 1 = 3 do not divide 16 devices: use tp 2"),
        (text("tp = 0"), ":6: runs.tp: tp must be > 0"),
        (text('tp = "8"'), ":6: runs.tp: must be a whole number, not '8'"),
        (text("tp = 2\ndp = 4"), ":7: runs.dp: dp 4: dp 4 x tp 2 x pp 1 x cp 1 = 8 are not the 16 devices: use dp 8"),
        (text("pp = 16", model="gpt2"), ":6: runs.pp: pp 16 x virtual_stages 1 is more than 12 layers: use pp 12"),
        (text("tp = 8", model="gpt2"), ":6: runs.tp: tp 8 does not divide 12 heads: use 6"),
        (text("ep = 2"), ":6: runs.ep: ep 2: llama3-8b has no experts"),
        (text('recompute = "ful"'), ":6: runs.recompute: 'ful' is not known; did you mean 'full'?"),
        (text('schedule = "zero-buble"'), ":6: runs.schedule: 'zero-buble' is not known; did you mean 'zero-bubble'?"),
        (text('pp = 2\nschedule = "dual-pipe-v"'), "dual-pipe-v has two stages on each rank (virtual_stages 2), not 1"),
        (text("dp_replicate = 3"), ":6: runs.dp_replicate: dp_replicate 3 does not divide 16 replicas (dp x cp): use 2"),
        (text("zero_stage = 0\ndp_replicate = 2"), "dp_replicate 2: zero_stage 0 splits nothing; use zero_stage 1"),
        (
            text("pp = 4\nstage_layers = [9, 9, 9, 9]"),
            ":7: runs.stage_layers: stage_layers 9,9,9,9: 36 layers, and llama3-8b has 32",
        ),
        (text("pp = 4\nstage_layers = [16, 16]"), "2 stages, and pp x virtual_stages is 4: use 8,8,8,8"),
        (text("recompute_layers = 4"), "recompute_layers 4 needs recompute full or selective, not none"),
        (text('recompute = "full"\nrecompute_layers = 40'), "stages have 32 layers at most; use 32, or 0 for all"),
        (text("expert_load = 0.5"), "expert_load must be at least 1 and finite, not 0.5"),
        (text('gradient_dtype = "fp8"'), ":6: runs.gradient_dtype: 'fp8' is not known"),
        (text("zero_stage = 4"), ":6: runs.zero_stage: '4' is not known"),
        (text(cluster="2xhgx-h10"), ":4: cluster: no cluster is called 'hgx-h10'; did you mean hgx-h100"),
        (text(precision="bf61"), ":5: precision: 'bf61' is not known; did you mean 'bf16'?"),
        (text(precision="fp8", cluster="2xdgx-a100-80"), "precision: NVIDIA A100 SXM4 80GB: its peak in fp8 is not known"),
        (
            text("pp = 2", framework="llm-foundry"),
            ":7: runs.pp: pp must be 1: of tp, pp, cp and ep the framework has data parallel",
        ),
        (text("pp = 2", framework="torchtune"), ":7: runs.pp: pp must be 1: of tp, pp, cp and ep the framework has tp, cp"),
        (text(framework="megatron"), ":5: framework: 'megatron' is not known; did you mean 'megatron-core'?"),
        (text().replace("sequence = 4096\n", ""), "'sequence' is missing; 'dpro-search describe' writes a complete file"),
        (text(model="no/config.json"), ":4: model: "),
        (text(model="resnet50", tied_embeddings=False), ":5: tied_embeddings: resnet50 has no embedding"),
        (measured("layers"), "model.times, table 1: block 'layers' is not known; did you mean 'layer'?"),
        (measured(forward_us=0), "table 1: forward_us must be above 0"),
        (measured(tp=3), "table 1: tp 3 does not divide 32 heads"),
        (measured(tp=32), "table 1: it was measured on 32 ranks, and the cluster has 16 devices"),
        (measured(width=3), "width: unknown key; known are block, forward_us"),
        (text(optimizer_state="fp8"), ":5: optimizer_state: 'fp8' is not known"),
        (text("optimizer_offload = true"), ":6: runs.optimizer_offload: offloading to the host is said in [runs] by"),
        (text(tp=2), ":5: tp: it stands in the table [runs]: put tp below that line"),
        (text('precision = "fp8"'), ":6: runs.precision: it stands at the top of the file: put precision before [runs]"),
        (text("gradient_checkpointing = true"), ":6: runs.gradient_checkpointing: recomputation is said in [runs] by recompute ="),
        (text(micro_batch_size=2), ":5: micro_batch_size: sequences that a device computes at a time are said in [runs] by micro"),
        (text(nodes=4), ":5: nodes: devices are said by cluster"),
        (text(framework_version="two"), ":5: framework_version: framework_version 'two' is no version: write it like 0.12"),
        (text(cuda="new", framework="pytorch-2"), ":5: cuda: cuda 'new' is no version: write it like 12.4"),
        (text(cuda="12.4"), "cuda: megatron-core is not predicted by it; leave it out"),
        (text(framework_version="1.0", framework="nanotron"), "no version of this framework is predicted otherwise; leave it out"),
        (
            text(attention_kernel="sdpa"),
            "attention_kernel: the kernel of attention is said by attention = one of flash2,",
        ),
        (text(optimizer="adamw8bit"), ":5: optimizer: 'adamw8bit': the type of the optimizer's states is said by optimizer_state"),
        (text(optimizer="lion"), ":5: optimizer: 'lion' cannot be said yet: only Adam"),
        (text('pp = 2\nschedule = "dualpipe"'), ":7: runs.schedule: 'dualpipe' is not known; did you mean 'dual-pipe'?"),
        (text('pp = 4\nschedule = "dual-pipe"\nvirtual_stages = 2'), "has an even number of ranks with one stage in two copies"),
        (text(batch_per_replica=4), "one of 'global_batch' and 'batch_per_replica' is needed"),
        ("global_batch = 4\n[model]\ntimes = []\n", "'cluster' is missing"),
    ],
)
def test_an_error_is_one_line_with_its_place_and_the_nearest_legal_value(tmp_path, content, said):
    path = tmp_path / "job.toml"
    path.write_text(content)
    line = refusal("replay", path)
    assert str(path) in line
    assert said in line


def test_another_toml_file_is_no_description(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text("nothing = 1\n")
    assert "describes no job: it has none of the keys model" in refusal("replay", path)


def test_the_empty_file_that_a_failed_command_leaves_is_called_empty(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("")
    assert "the file is empty, so that it describes no job" in refusal("replay", path)


@pytest.mark.parametrize("model", ["gpt2", "llama3-8b", "mixtral-8x7b", "bert-large"])
def test_describe_writes_a_file_that_every_verb_takes(tmp_path, model):
    path = tmp_path / "job.toml"
    path.write_text(printed("describe", model, "--cluster", "4xhgx-h100", "--global-batch", 256, "--seq-len", 512))
    assert job_of(load_source(path)).predict(Plan()).infeasible is None
    assert verb("replay", path)["predicted_iteration_us"] > 0


@every_case("model", [*names(), *NETWORKS])
def test_every_verb_reads_what_describe_writes_of_a_model(tmp_path, model):
    (tmp_path / "job.toml").write_text(description_text(Wanted(model=model, cluster="2xhgx-h100")))
    assert job_of(load_source(tmp_path / "job.toml")).predict(Plan()).iteration_us > 0


@every_case("cluster", describable_names()["clusters"])
def test_every_verb_reads_what_describe_writes_of_a_cluster(tmp_path, cluster):
    written = description_text(Wanted(model="gpt2", cluster=cluster))
    (tmp_path / "job.toml").write_text(written)
    assert job_of(load_source(tmp_path / "job.toml")).predict(Plan()).iteration_us > 0


def test_describe_refuses_hosts_of_several_kinds_as_every_verb_does(tmp_path):
    hosts = '[[host]]\ncount = 1\nbase = "hgx-h100"\n[[host]]\ncount = 1\nbase = "dgx-a100-80"\n'
    (tmp_path / "mixed.toml").write_text(f'name = "mixed"\n{hosts}')
    (tmp_path / "job.toml").write_text(text(cluster="mixed.toml"))
    said = "devices of one kind are needed, not NVIDIA A100 SXM4 80GB and NVIDIA H100 SXM5 80GB"
    assert said in refusal("describe", "llama3-8b", "--cluster", tmp_path / "mixed.toml")
    assert said in refusal("replay", tmp_path / "job.toml")


def test_describe_lists_what_it_knows_by_name():
    listed = json.loads(printed("describe", "--list", "--json"))
    assert set(listed) == {"models", "clusters", "frameworks"}
    assert {"llama3-8b", "resnet50"} <= {*listed["models"]}
    assert {"hgx-h100", "h100-sxm"} <= {*listed["clusters"]}
    assert "tpu-v5p" not in listed["clusters"]  # described jobs have no cost model for TPUs
    assert "  llama3-8b\n" in printed("describe", "--list")
    assert "MODEL is missing; 'dpro-search describe --list'" in refusal("describe")


def test_only_near_names_are_suggested():
    assert "is not known: known: gpt2, " in refusal("describe", "llama4", "--cluster", "hgx-h100")


def test_describe_refuses_what_does_not_exist():
    assert "did you mean llama3-8b" in refusal("describe", "llama3-8", "--cluster", "4xhgx-h100")
    assert "no cluster is called" in refusal("describe", "llama3-8b", "--cluster", "4xhgx")
    assert "--precision int4" in refusal("describe", "llama3-8b", "--cluster", "4xhgx-h100", "--precision", "int4")


def test_the_usual_strategy_splits_further_where_the_batch_is_small(tmp_path):
    today = job(tmp_path, None, global_batch=2).space.today
    assert (today.dp, today.devices) == (2, 16)


def test_the_layout_of_llama_3_405b_is_predicted(tmp_path):
    """Llama 3, section 3.3, on 16,384 H100: the first and the last of 128 stages have a layer less; 400 TFLOP/s and 41 % MFU."""
    layers = [0, *[1] * 126, 0]
    runs = f"tp = 8\npp = 16\nvirtual_stages = 8\nzero_stage = 2\nmicro_batch = 1\nstage_layers = {layers}"
    planned = job(tmp_path, runs, model="llama3-405b", cluster="2048xhgx-h100", global_batch=2048, sequence=8192)
    assert planned.predict(Plan()).infeasible is None
    assert planned.predict(Plan()).iteration_us == pytest.approx(planned.work.flops / 400e12 * 1e6, rel=0.12)
    (tmp_path / "job.toml").write_text(text("pp = 16\nvirtual_stages = 8", model="llama3-405b", cluster="16xhgx-h100"))
    assert "is more than 126 layers: use pp 15, or stage_layers with none" in refusal("replay", tmp_path / "job.toml")
