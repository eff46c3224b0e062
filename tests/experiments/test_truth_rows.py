"""How published rows are read: blanks, options in names, machines, and memory as their sources report it."""

import pytest

from dpro_search.parallel.memory.peak import PeakMemory, rank_memories
from dpro_search.parallel.workload import Workload
from experiments.truth import __main__ as truth
from experiments.truth.blanks import completed
from experiments.truth.jobs import workload_of
from experiments.truth.memory import partly_recomputed, phases_of, reported_bytes
from experiments.truth.models import model_of
from tests.experiments.published_rows import row, row_of

TEST = {
    "source": "megatron-golden-values",
    "framework": "Megatron-Core dev",
    "gpu": "H100",
    "layers": 12,
    "hidden": 512,
    "heads": 8,
    "seq_len": 1024,
    "micro_batch": 4,
    "global_batch": 32,
    "n_gpus": 8,
}
PLAYBOOK = "hf-ultrascale-playbook"
GPT = {"model": "GPT 182B", "heads": "96", "kv_heads": "", "ffn_hidden": "", "vocab": "", "n_gpus": "384", "gpu": "A100-80GB"}


def test_rows_that_may_have_recomputed_hold_what_fits() -> None:
    def held(activations: float) -> PeakMemory:
        return PeakMemory(
            weights_bytes=10.0,
            gradients_bytes=0.0,
            optimizer_bytes=0.0,
            activations_bytes=activations,
            logits_bytes=0.0,
            gathered_bytes=0.0,
        )

    for limit, expected in ((200.0, 90.0), (65.0, 50.0), (5.0, 10.0)):  # all, half of the layers, none
        (row_with_memory,) = partly_recomputed([held(90.0)], [held(10.0)], limit, 8)
        assert row_with_memory.activations_bytes == expected
        assert row_with_memory.weights_bytes == 10.0


def test_a_test_of_megatron_has_the_options_that_its_name_gives() -> None:
    dims = {
        "layers": 12,
        "hidden": 512,
        "heads": 8,
        "seq_len": 1024,
        "micro_batch": 4,
        "global_batch": 32,
        "gpu": "A100",
        "n_gpus": 8,
    }
    options = {"zero_stage": "distributed-optimizer", "framework": "Megatron-LM", "source": "megatron-golden-values"}

    def workload(name: str, **layout: int) -> Workload:
        return workload_of(row(**dims, **options, model=f"gpt/gpt3_mcore_te_{name}", **layout))

    assert workload("tp2_pp1_multi_dist_optimizer_instances", tp=2).strategy.dp_replicate == 2
    assert workload("tp1_pp4_vp1_uneven_pipeline", pp=4).strategy.stage_layers == (2, 4, 4, 2)
    plain, deferred = (
        rank_memories(workload(f"tp2_pp2_resume{name}", tp=2, pp=2))[-1].allocated_bytes
        for name in ("", "_defer_embedding_wgrad_compute")
    )
    assert (
        deferred - plain == 2 * 2 * 4 * 1024 * 50432 / 2
    )  # gradients in 16 bits of the logits of two micro-batches, half of them here
    stored = {name: not workload(name, tp=2).runtime.flash_attention for name in ("pp1", "pp1_resume", "cross_entropy_loss_fusion")}
    assert stored == {"pp1": True, "pp1_resume": False, "cross_entropy_loss_fusion": False}
    latent = workload("tp2_pp2_mla", tp=2, pp=2).model.layers[0].attention
    assert latent.latent
    assert workload("tp1_pp4_swiglu", pp=4).model.layers[0].feed_forward.hidden == 1344  # 2 / 3 of 4 x 512, in multiples of 64


def test_deterministic_tests_of_megatron_have_larger_workspaces() -> None:
    workspaces = {
        overlap: workload_of(row(**TEST, model="gpt/gpt3_mcore_te_tp1_pp1", overlap=overlap)).runtime.memory.matmul_workspace_bytes
        for overlap in ("deterministic-mode", "")
    }
    assert workspaces == {"deterministic-mode": 32 * 2**20, "": None}


@pytest.mark.parametrize(
    ("name", "precision", "engine"),
    [
        ("bert/bert_mcore_tp2_pp2", "bf16", True),
        ("bert/bert_mcore_tp2_pp2_resume_torch_dist_local_spec", "bf16", False),
        ("gpt/gpt3_mcore_te_tp1_pp1", "bf16", True),
        ("gpt/gpt3_mcore_tp1_pp4", "bf16", False),
        ("gpt/gpt3_mcore_tp2_pp2_uninstall_te", "bf16", False),
        ("gpt/gpt3_weekly_mcore_tp2_pp2", "bf16 + fp8 hybrid", True),
    ],
)
def test_tests_of_megatron_say_in_their_names_whose_layers_they_have(name, precision, engine) -> None:
    rules = workload_of(row(**TEST, model=name, precision=precision)).runtime.memory
    assert (rules.transformer_engine, rules.shared_scores) == (engine, not engine)


def test_tests_of_bert_have_its_heads_and_tests_of_experts_no_biases() -> None:
    bert = workload_of(row(**TEST, model="bert/bert_mcore_tp1_pp2")).model
    assert bert.pooler
    assert bert.head_transform
    experts = (
        workload_of(row(**TEST, model="moe/gpt3_moe_mcore_te_ep8_resume", experts=8, top_k=2, ep=8)).model.layers[0].feed_forward
    )
    assert (experts.hidden, experts.bias) == (1024, False)


def test_tests_that_stand_for_deepseek_v3_have_dense_layers_and_a_layer_for_a_second_token() -> None:
    options = {**TEST, "layers": 15, "hidden": 1024, "heads": 32, "ffn_hidden": 4096, "experts": 32, "top_k": 4, "notes": "; MLA"}
    options |= {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "model": "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading"}
    job_workload = workload_of(row(**options))
    assert [layer.count for layer in job_workload.model.layers] == [3, 13]
    assert job_workload.strategy.stage_layers == (3, 2, 2, 2, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("pp", "n_gpus", "source", "checked"),
    [(2, 16, PLAYBOOK, True), (1, 16, PLAYBOOK, False), (2, 8, PLAYBOOK, False), (2, 16, "vtrain-multi", False)],
)
def test_the_playbooks_pipelines_over_hosts_check_their_collectives(pp, n_gpus, source, checked):
    dims = {"layers": 16, "hidden": 2048, "heads": 32, "seq_len": 4096, "micro_batch": 1, "global_batch": 256, "gpu": "H100"}
    job = workload_of(row(**dims, model="llama-like 1B", source=source, framework="nanotron", pp=pp, n_gpus=n_gpus))
    assert (job.runtime.host.check_rank_us > 0) == checked


@pytest.mark.parametrize(
    ("values", "column", "alternatives"),
    [
        ({}, "precision", ["bf16"]),
        ({"precision": ""}, "precision", ["bf16"]),
        ({"precision": "", "gpu": "V100-32GB"}, "precision", ["fp16"]),
        ({"precision": "", "source": "mlperf-v5.0", "gpu": "NVIDIA B200"}, "precision", ["fp8"]),
        ({"precision": "", "source": "mlperf-v5.1", "gpu": "NVIDIA B200"}, "precision", ["fp8", "fp4"]),
        ({"heads": "", "tp": "8"}, "heads", ["32", "64"]),
        ({"framework": "PyTorch FSDP (fms-fsdp)", "recompute": "selective"}, "recompute", ["none", "full"]),
    ],
)
def test_a_blank_becomes_all_that_it_may_be(values, column, alternatives):
    assert sorted({whole.values.get(column, "") for whole in completed(row_of(**values))}) == sorted(alternatives)


@pytest.mark.parametrize(
    ("values", "layers", "vocabulary"),
    [
        ({"layers": "78", "hidden": "13824"}, 78, 250_880),  # 182.3 billion parameters; with GPT-2's vocabulary 179.6
        ({"model": "GPT 200B", "layers": "80", "hidden": "14400"}, 80, 50_257),
        ({"model": "GPT 183B", "layers": "", "hidden": "14400", "pp": "12"}, 72, 250_880),
    ],
)
def test_the_size_in_a_models_name_decides_what_its_row_leaves_blank(values, layers, vocabulary):
    model = model_of(completed(row_of(**{**GPT, **values}))[0])
    assert (sum(layer.count for layer in model.layers), model.vocab) == (layers, vocabulary)


def test_the_prediction_of_a_blank_lies_between_those_of_what_it_may_be():
    def step_s(**values):
        return truth.PREDICTORS["cold"](row_of(source="mlperf-v5.1", gpu="NVIDIA B200", **values)).step_s

    assert step_s(precision="") == pytest.approx((step_s(precision="fp8") * step_s(precision="fp4")) ** 0.5)


@pytest.mark.parametrize(
    ("cell", "stage", "replicas"),
    [
        ("FSDP2 (3)", 3, 1),
        ("FSDP FULL_SHARD (3)", 3, 1),
        ("SHARD_GRAD_OP", 2, 1),
        ("1 (distributed optimizer)", 1, 1),
        ("1.0", 1, 1),
        ("1 over 8 GPUs (one node)", 1, 2),
        ("HSDP", 3, 2),
        ("FSDP (ici {'fsdp': '8'}; dcn {'data': '2', 'fsdp': '1'})", 3, 2),
        ("FSDP=0", 1, 1),  # NeMo's recipes split the optimizer's state
    ],
)
def test_a_zero_stage_is_read_as_its_source_spells_it(cell, stage, replicas):
    strategy = workload_of(row_of(zero_stage=cell, n_gpus="16", dp="16")).strategy
    assert (strategy.zero_stage, strategy.dp_replicate) == (stage, replicas)


@pytest.mark.parametrize(
    ("cell", "count", "rate_bps"),
    [
        ("4 x 100 Gb/s RoCE", 4, 100e9),
        ("800 Gbps per node (table header)", 8, 100e9),
        ("RDMA 400 Gb/s per GPU", 8, 400e9),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 200Gb/s, Management: 100Gb/s", 8, 200e9),
        ("6 x 200 Gb/s Ethernet", 1, 1200e9),  # six cards that eight devices share
        ("Ethernet, Infiniband", 8, 400e9),  # nothing said: the machine's own
    ],
)
def test_network_cards_are_those_that_a_row_gives(cell, count, rate_bps):
    nics = workload_of(row_of(inter_net=cell, n_gpus="16", dp="16")).cluster.groups[0].host.nics
    assert (nics.count, nics.link.rate_bps) == (count, rate_bps)


def test_a_host_with_a_third_of_the_nvlinks_has_a_third_of_the_rate():
    def rate_bps(cell):
        return workload_of(row_of(gpu="A100-80GB", intra_link=cell)).cluster.groups[0].host.links[0].rate_bps

    assert rate_bps("NVLink (4 NVLink inter-gpu connects per doc)") == pytest.approx(rate_bps("NVLink/NVSwitch") / 3)


def test_a_figure_in_gigabytes_of_1e9_bytes_is_compared_in_these() -> None:
    memory = PeakMemory(
        weights_bytes=1e9, gradients_bytes=0.0, optimizer_bytes=0.0, activations_bytes=0.0, logits_bytes=0.0, gathered_bytes=0.0
    )
    assert reported_bytes(row_of(memory_kind="peak, GB = 1e9 bytes"), [memory], 80e9) == pytest.approx(2**30)
    assert reported_bytes(row_of(memory_kind="GiB peak (max over ranks)"), [memory], 80e9) == 1e9


def test_retinanet_of_mlperf_warms_validation_up_on_a_batch_of_its_own() -> None:
    row = row_of(
        source="mlperf-v5.0",
        model="RetinaNet SSD",
        n_gpus="8",
        dp="8",
        micro_batch="4",
        global_batch="32",
        grad_accum="1",
        hidden="",
        layers="",
    )
    training, validation = phases_of(row, workload_of(row))
    assert (training.strategy.micro_batch, validation.strategy.micro_batch) == (4, 32)
    assert training.runtime.memory.logits_bytes == 2 * validation.runtime.memory.logits_bytes


def test_micro_batches_of_torchtitans_pipelines_are_as_many_as_its_stages() -> None:
    row = {
        "framework": "torchtitan",
        "n_gpus": "64",
        "dp": "8",
        "pp": "8",
        "micro_batch": "",
        "global_batch": "256",
        "layers": "16",
    }
    single = workload_of(row_of(overlap="torch.compile 1F1B", **row)).strategy
    looped = workload_of(row_of(overlap="torch.compile Interleaved 1F1B", **row)).strategy
    assert (single.virtual_stages, single.micro_batch, looped.virtual_stages, looped.micro_batch) == (1, 4, 2, 2)
    assert not single.reshard


def test_litgpt_splits_parameters_where_it_has_several_devices() -> None:
    assert workload_of(row_of(framework="LitGPT", n_gpus="4", dp="4")).strategy.zero_stage == 3
    assert workload_of(row_of(framework="LitGPT", n_gpus="1", dp="1")).strategy.zero_stage == 0


@pytest.mark.parametrize(
    ("path", "overlap", "framework", "flash"),
    [
        ("golden_values_lts_dgx_a100.json", "deterministic-mode", "Megatron-Core lts", True),
        ("golden_values_lts_dgxa100_dracooci.json", "deterministic-mode", "Megatron-Core lts", False),
        ("golden_values_lts_dgxa100_dracooci.json", "", "Megatron-Core lts", True),
        ("golden_values_dev_dgxa100_dracooci.json", "deterministic-mode", "Megatron-Core dev", True),
    ],
)
def test_deterministic_tests_in_old_containers_store_scores(path, overlap, framework, flash) -> None:
    model = "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist"
    test = row(**{**TEST, "gpu": "A100", "model": model, "framework": framework, "source_path": path, "overlap": overlap})
    assert workload_of(test).runtime.flash_attention == flash


def test_tests_of_reinforcement_learning_keep_keys_and_values_for_what_they_generate() -> None:
    test = row(**{**TEST, "model": "gpt/gpt_grpo_tp1_pp1_dp8_583m", "memory_kind": "GiB torch max allocated"})
    memory = rank_memories(workload_of(test))[-1]
    assert reported_bytes(test, [memory], 80e9) == memory.allocated_bytes + 40 * 2**30
    large = row(**{**TEST, "model": "gpt/gpt_grpo_tp4_pp1_dp2_8b", "memory_kind": "GiB torch max allocated"})
    assert reported_bytes(large, [memory], 80e9) == memory.allocated_bytes + 20 * 2**30
    assert not model_of(large).tied


@pytest.mark.parametrize(
    ("micro_batch", "grad_accum", "global_batch", "n_gpus", "micro", "batch"),
    [
        ("128", "64", "65536", "8", 128, 65536),
        ("8192", "64", "4194304", "8", 128, 4194304),  # what a step accumulates
        ("126", "32.508", "65536.128", "16", 128, 65536),  # 4096 sequences in 32 steps
    ],
)
def test_micro_batches_of_nvidias_bert_are_those_of_its_scripts(
    micro_batch, grad_accum, global_batch, n_gpus, micro, batch
) -> None:
    given = {"micro_batch": micro_batch, "grad_accum": grad_accum, "global_batch": global_batch, "n_gpus": n_gpus, "dp": n_gpus}
    bert = {"source": "nvidia-deeplearningexamples", "framework": "PyTorch", "model": "BERT", "seq_len": "128", "gpu": "A100-80GB"}
    dims = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"), "")
    strategy = workload_of(row_of(**given, **bert, **dims)).strategy
    assert (strategy.micro_batch, strategy.global_batch) == (micro, batch)


def test_an_a100_of_either_size_has_the_larger_memory() -> None:
    (group,) = workload_of(row_of(gpu="NVIDIA A100 (40/80 GB not stated)")).cluster.groups
    assert group.host.device.memory_bytes > 60e9
