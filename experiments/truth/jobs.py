"""`workload_of`: the job that a published run describes, as the predictor takes it."""

from __future__ import annotations

import re
from dataclasses import replace

from dpro_search.errors import InputError
from dpro_search.parallel.frameworks import FRAMEWORKS, ON_WHEELS, as_compiled
from dpro_search.parallel.gpu_ops import AdapterKernels, AttentionKernels, ImageLayout, NormKernels
from dpro_search.parallel.model import Network
from dpro_search.parallel.runtime import CHECKED_RANK_US, HostTimes, Runtime
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import Workload
from experiments.truth.blanks import completed
from experiments.truth.machines import cluster_of, devices_of, gpu_of, machine_of
from experiments.truth.megatron_tests import (
    dense_layers,
    has_latent_experts,
    is_test,
    predicts_two_tokens,
    splits_parameters,
    stores_scores,
)
from experiments.truth.memory import rules_of
from experiments.truth.models import is_network, model_of, sequence_of
from experiments.truth.rows import Row, publisher_of

PRECISIONS = (
    (r"mxfp8", "mxfp8"),
    (r"fp4", "nvfp4"),
    (r"fp8|float8", "fp8"),
    (r"bf16", "bf16"),
    (r"fp16|amp|mixed", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32", "fp32"),
)
MOST_OF_BERT = 65536  # Sequences of a step of NVIDIA's BERT (scripts/run_pretraining.sh: 65536 of 128 tokens, 32768 of 512).
BERT_FILLED = (
    0.5  # Of the tokens of MLPerf's BERT sequences; the rest is padding, which submissions take out (MLPerf training, BERT).
)
BIN_TOKENS = 128  # Sequences that were cut to so many tokens are nearly full.
# Networks whose layers are the framework's own modules, without Python around each kernel: PyTorch dispatches a bare op in about
# 5 us and launches its kernel in 5 us (measured on tensors of a few elements, torch 2.13).
BARE_HOST = HostTimes(forward_us=15.0, backward_us=10.0, collective_us=50.0, parameter_us=2.0)
FIRST_OVERLAPPING = 26.06  # release of Megatron-Bridge
NOT_COMPILED = r"v-?net"  # examples/vnet_benchmark.py names no XLA, unlike the scripts of NVIDIA's other segmentation networks.
FRAMEWORK_NAMES = (  # name of a framework in a row -> the package's name
    (r"nanotron", "nanotron"),
    (r"foundry", "llm-foundry"),
    (r"torchtitan", "torchtitan"),
    (r"torchtune", "torchtune"),
    (r"litgpt", "litgpt"),
    (r"fsdp", "fsdp"),
    (r"megatron-deepspeed", "megatron-deepspeed"),
    (r"hf transformers|accelerate|^pytorch$", "pytorch"),
    (r"^tensorflow", "tensorflow"),
    (r"", "megatron-core"),
)


def workloads_of(row: Row) -> tuple[Workload, ...]:
    """The jobs that a row may describe, the likeliest first; raises `InputError` where it is none that can be predicted."""
    return tuple(_workload(whole) for whole in completed(row))


def workload_of(row: Row) -> Workload:
    """The job that a row most likely describes; raises `InputError` where it is none that can be predicted."""
    return _workload(completed(row)[0])


def _workload(row: Row) -> Workload:
    strategy, model = _strategy(row), model_of(row)
    sequence = 1 if isinstance(model, Network) else sequence_of(row)
    if not sequence:
        raise InputError("the sequence's length is not given")
    if isinstance(model, Network) and model.tables:
        strategy = replace(strategy, ep=strategy.dp)  # The ranks share the tables (hybrid parallel).
    if "bert" in row.text("model") and (row.text("source").startswith("mlperf") or (_is_binned(row) and sequence > BIN_TOKENS)):
        sequence = round(sequence * BERT_FILLED)
    return Workload(
        model=model,
        sequence=sequence,
        strategy=strategy,
        cluster=cluster_of(row),
        precision=_precision(row),
        runtime=runtime_of(row),
    )


def _is_binned(row: Row) -> bool:
    """Whether a batch has sequences of about the same length, so that it has little padding.

    NVIDIA's BERT for PyTorch and for PaddlePaddle loads its data with LDDL in bins (data/create_datasets_from_start.sh, and
    `bin_size_64` in scripts/run_pretraining.sh), unlike those for others.
    """
    is_bert = "deeplearningexamples" in row.text("source") and row.text("model") == "bert"
    return is_bert and row.text("framework") in ("pytorch", "paddlepaddle")


def runtime_of(row: Row) -> Runtime:
    """How the framework of a row runs a step."""
    name = next(name for pattern, name in FRAMEWORK_NAMES if re.search(pattern, row.text("framework")))
    if row.text("source").startswith("mlperf"):
        name = "megatron-core-cuda-graphs"  # Submissions to MLPerf training capture layers as CUDA graphs.
    runtime = FRAMEWORKS[name].runtime
    if re.match("mlperf|megatron-bridge|dgxc|nemo", row.text("source")) and not is_network(row):
        # NVIDIA's recipes for performance sum gradients in 16 bits (Megatron-Bridge and NeMo: grad_reduce_in_fp32 = False).
        runtime = replace(runtime, gradient_bytes=2.0)
    if "fp32 grad" in row.text("precision") and name == "megatron-deepspeed":
        # BF16_Optimizer (bf16_optimizer.py, `update_hp_grads`): gradients in 16 bits are added to sums in fp32, which are reduced,
        # and set to zero.
        memory = replace(runtime.memory, kept_gradient_bytes=2.0, part_bytes=0.0)
        runtime = replace(runtime, gradient_bytes=4.0, memory=memory)
    says = name == "torchtune" or (name in ("fsdp", "torchtitan") and row.text("overlap"))  # whether its layers are compiled
    fuses = _is_binned(row) and name == "pytorch"  # run_pretraining.py of NVIDIA's BERT: nvFuser
    if says or fuses:
        named = "compile" in row.text("overlap") or re.search(r"torch compile enabled|\+ compile", row.text("notes"))
        runtime = as_compiled(runtime, compiled=fuses or bool(named))
    if is_network(row) and not row.text("source").startswith("mlperf"):
        runtime = replace(runtime, host=BARE_HOST)
    kernels = replace(runtime.kernels, attention=AttentionKernels.SCORES) if stores_scores(row) else runtime.kernels
    if name in ON_WHEELS:  # published in 2023 and 2024, with CUDA 12.1 to 12.4
        kernels = replace(kernels, wheels=True)
    if re.search(NOT_COMPILED, row.text("model")) and name == "tensorflow":
        kernels = replace(kernels, instance_norm=NormKernels.COMPOSED, fused=False)
    if re.search(r"jax|paxml", row.text("framework")):
        kernels = replace(kernels, adapters=AdapterKernels.IN_MATMULS)
    if "internevo" in row.text("framework"):  # modules of flash-attention; silu(w1 x) * w3 x in kernels of their own (model/mlp.py)
        kernels = replace(kernels, fused=False, attention=AttentionKernels.FLASH_2)
    if "paddle" in row.text("framework"):  # scripts/run_pretraining.sh does not ask for fused attention
        kernels = replace(kernels, attention=AttentionKernels.SCORES, attention_dropout=True)
    if row.text("framework") == "tensorflow":  # beside "tensorflow2"
        kernels = replace(kernels, layout=ImageLayout.HALF_IMAGES_LAST)
    if row.text("model") == "ssd":  # --data-layout of NVIDIA's PyTorch/Detection/SSD/main.py
        kernels = replace(kernels, layout=ImageLayout.CHANNELS_LAST)
    if "foundry" in row.text("framework"):
        kernels = replace(kernels, attention=AttentionKernels.FLASH_TRITON)  # Its attention of 2023.
    if _checks_collectives(row):
        runtime = replace(runtime, host=replace(runtime.host, check_rank_us=CHECKED_RANK_US))
    notes = row.text("notes")
    # Paged optimizers keep their states in memory that the driver moves, beside PyTorch's allocator (bitsandbytes: `get_paged`).
    state_bytes = (
        0.0 if re.search("no optimizer step|paged", notes) else 2.0 if re.search("8-?bit", notes) else runtime.optimizer_bytes
    )
    if re.search("optimizer_in_bwd|optimizer step into backward", notes):
        runtime = replace(runtime, gradient_bytes=0.0)  # Each gradient is freed when its parameter is updated.
    return replace(runtime, kernels=kernels, memory=rules_of(row, runtime.memory), optimizer_bytes=state_bytes)


def _overlaps_experts(row: Row) -> bool:
    """Whether tokens travel to experts and back beside another micro-batch.

    Recipes of Megatron-Bridge in MXFP8 do so for DeepSeek-V3, GPT-OSS and Qwen3 from June 2026 on (scripts/performance/configs:
    `moe_a2a_overlap`), those of Kimi K2 do not. Pipelines need virtual stages for it.
    """
    release = re.search(r"(\d\d\.\d\d)\S* nemo container", row.text("framework"))
    if release is None or float(release[1]) < FIRST_OVERLAPPING or row.text("precision") != "mxfp8":
        return False
    is_possible = row.whole("pp", 1) == 1 or row.whole("vpp", 1) > 1
    return is_possible and bool(re.search("deepseek|gpt.oss|qwen3", row.text("model")))


def _checks_collectives(row: Row) -> bool:
    """Whether every collective was checked before it was called.

    nanotron's run_multinode.sh, by which scripts/scaling_benchmarks.py starts the playbook's runs, sets TORCH_DISTRIBUTED_DEBUG to
    DETAIL in its later versions only, and rows do not say their version. Of the runs with pipelines over hosts, layers take 2.5 ms
    more for each tensor parallel rank however much they compute and wherever the ranks are, and layers without tensor parallel
    ranks nothing; a few runs without pipelines do as well, among them one that was published twice, 4.9 times apart.
    """
    return "playbook" in row.text("source") and row.whole("pp", 1) > 1 and devices_of(row) > row.whole("gpus_per_node", 8)


# What Megatron-LM's tests whose names say so have in their model_config.yaml: --num-distributed-optimizer-instances; layers of the
# first and of the last of uneven stages.
OPTIMIZERS, UNEVEN_ENDS = 2, 2
UNEVEN = 0.01
"""Of a batch: what scripts that round the number of their micro-batches leave out or add, at most."""

# Machine or card, framework, and who published the row; networks that are no transformers are a kind of their own.
Kind = tuple[str, str, str]


def kind_of(row: Row) -> Kind:
    """GPU, framework and publisher of a row, without versions and variants."""
    name = runtime_of(row).name
    return machine_of(row), f"{name}, networks" if is_network(row) else name, publisher_of(row.values["source"])


def _precision(row: Row) -> str:
    precision = next((name for pattern, name in PRECISIONS if re.search(pattern, row.text("precision"))), None)
    if precision is None:
        raise InputError(f"precision {row.values['precision']}")
    if precision == "nvfp4" and "mi3" in gpu_of(row):
        return "mxfp4"
    if precision == "fp32" and "deeplearningexamples" in row.text("source") and "a100" in gpu_of(row):
        return "tf32"  # NVIDIA's containers compute fp32 like that from Ampere on
    return precision


def _expert_width(row: Row, tp: int) -> int:
    """Tensor parallel degree of experts: in Megatron-LM that of the model, unless it is named; recipes of NeMo name 1."""
    if not is_test(row) or not row.number("experts"):
        return 1
    named = re.search(r"etp(\d+)", row.text("model"))
    return int(named.group(1)) if named else tp


def _default_stage(row: Row) -> int:
    """NeMo's recipes split the optimizer state; Megatron-LM's tests say where they do."""
    if is_test(row):
        return 3 if splits_parameters(row) else 1 if "distributed-optimizer" in row.text("zero_stage") else 0
    if row.text("source").startswith("mlperf"):
        # distributed_fused_adam of its language models; DistributedFusedLAMB of its BERT splits in hosts, then sums over them.
        return 0 if is_network(row) or "bert" in row.text("model") else 1
    # BigScience's scripts have ZERO_STAGE=1 (train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm).
    return 1 if re.search(r"nemo|megatron-core", row.text("framework")) or "bigscience" in row.text("source") else 0


def _usual_virtual_stages(row: Row, pp: int) -> int:
    """Of submissions to MLPerf that do not give them: as those that do, a layer each."""
    if "torchtitan" in row.text("framework") and "interleaved" in row.text("overlap"):
        return 2  # models/llama/parallelize_llama.py (pipelining_utils.py): two stages a rank where a schedule loops.
    per_stage, left = divmod(row.whole("layers", 1), pp)
    return 1 if left or not row.text("source").startswith("mlperf") else max(per_stage, 1)


def _stage_layers(row: Row, pp: int) -> tuple[int, ...]:
    """Of tests of uneven stages (--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers); (): as many each.

    Those with latent experts have three layers on the first stage, two on the next six and the others on the last one
    (--pipeline-model-parallel-layout), or two on each; a layer for a second token is on the last one.
    """
    if has_latent_experts(row) and pp > 1:
        left = row.whole("layers", 1) + predicts_two_tokens(row)
        first = (2,) * 7 if row.number("vpp") else (dense_layers(row), *(2,) * 6)
        return (*first, left - sum(first))
    stages, layers = pp * row.whole("vpp", 1), row.whole("layers", 1)
    if row.text("source").startswith("mlperf") and stages > 1 and layers % stages and not (layers + 2) % stages:
        # ASYM_PP_EMBED and ASYM_PP_LOSS of NVIDIA's configurations: the embedding and the loss count as a layer each.
        each = (layers + 2) // stages
        return (each - 1, *(each for _ in range(stages - 2)), each - 1)
    if "uneven_pipeline" not in row.text("model"):
        return ()
    each = (row.whole("layers", 1) - 2 * UNEVEN_ENDS) // (pp - 2)
    return (UNEVEN_ENDS, *(each for _ in range(pp - 2)), UNEVEN_ENDS)


def _first_word(row: Row, name: str) -> str:
    return (re.split(r"[^a-z]", row.text(name).removeprefix("remat_policy="), maxsplit=1) or [""])[0]


def _zero_stage(row: Row) -> int:
    """The stage of ZeRO that a row names, as frameworks spell it: a number, FSDP and HSDP, or a sharding strategy of PyTorch."""
    zero = row.text("zero_stage")
    if "grad_op" in zero:
        return 2
    if re.match(r"fsdp( full_shard|=[1-9]|2?( \(3\)| [0-9]| \(ici|$))|hsdp|hybrid_shard|full_shard", zero):
        return 3
    if not zero and "litgpt" in row.text("framework") and devices_of(row) > 1:
        return 3  # FSDPStrategy of its scripts (litgpt/finetune/full.py).
    match = re.match(r"[0-3](?=\.0|\b)", zero)
    return int(match[0]) if match else _default_stage(row)


def _replicas(row: Row, dp: int, tp: int) -> int:
    """Groups of data parallel ranks that each hold all of what ZeRO splits."""
    zero = row.text("zero_stage")
    if "multi_dist_optimizer_instances" in row.text("model"):
        return OPTIMIZERS
    if match := re.search(r"over (\d+) gpus", zero):
        return max(dp // int(match[1]), 1)
    if match := re.search(r"'data': '(\d+)'", zero):
        return int(match[1])
    if zero.startswith(("hsdp", "hybrid_shard")):
        return max(dp * tp // row.whole("gpus_per_node", 8), 1)
    return 1


def _strategy(row: Row) -> Strategy:
    recompute = {"full": Recompute.FULL, "selective": Recompute.SELECTIVE}.get(_first_word(row, "recompute"), Recompute.NONE)
    if has_latent_experts(row) and "offloading" not in row.text("model"):
        recompute = Recompute.NONE  # What they do compute again is not the scores (--recompute-modules).
    tp, pp, cp = row.whole("tp", 1), row.whole("pp", 1), row.whole("cp", 1)
    uneven = _stage_layers(row, pp)
    stages = row.whole("vpp", max(_usual_virtual_stages(row, pp), len(uneven) // pp))
    given = row.number("sequence_parallel")
    sequence_parallel = tp > 1 and (bool(given) if given is not None else "deepspeed" not in row.text("framework"))
    dp = row.whole("dp", max(devices_of(row) // (tp * pp * cp), 1))
    global_batch = row.number("global_batch")
    if not global_batch:
        raise InputError("the batch is not given")
    # A pipeline's micro-batches are of one sample where a row does not say how many there are; Accelerate's plugin for Megatron-LM
    # has one micro-batch in a step unless it is told another number (megatron_lm_num_micro_batches).
    alone = pp > 1 and "accelerate" not in row.text("framework")
    if pp > 1 and "torchtitan" in row.text("framework") and not row.number("micro_batch"):
        # --experimental.pipeline_parallel_microbatches: as many as there are stages.
        row = replace(row, values={**row.values, "micro_batch": str(max(global_batch // (dp * pp * stages), 1))})
    micro_batch = row.number("micro_batch") or (1 if alone else max(global_batch // (dp * row.whole("grad_accum", 1)), 1))
    if _is_binned(row) and global_batch >= 2 * MOST_OF_BERT:
        # run_pretraining.py of NVIDIA's BERT divides --train_batch_size, which such a table gives, by the steps of accumulation;
        # the batch that follows from its columns is that many times too large, and so is the time that follows from it.
        micro_batch /= row.whole("grad_accum", 1)
    elif _is_binned(row) and global_batch % (micro_batch * dp):  # run_pretraining.sh and .py round down, one after the other
        steps = max(global_batch // (micro_batch * dp), 1)
        micro_batch = global_batch // dp // steps
        global_batch = micro_batch * steps * dp
    if is_network(row):  # of batches that are not divided evenly, the mean
        micro_batch = max(round(global_batch / (dp * row.whole("grad_accum", 1))), 1)
        global_batch = micro_batch * dp * row.whole("grad_accum", 1)
    together = micro_batch * dp
    if global_batch % together and abs(round(global_batch / together) * together / global_batch - 1) < UNEVEN:
        global_batch = round(global_batch / together) * together
    if not float(micro_batch).is_integer():
        raise InputError(f"micro-batch {micro_batch:g}")
    return Strategy(
        dp=dp,
        dp_replicate=_replicas(row, dp, tp),
        stage_layers=uneven,
        etp=_expert_width(row, tp),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=row.whole("ep", 1),
        virtual_stages=stages if pp > 1 else 1,
        zero_stage=_zero_stage(row),
        # In pipelines torchtitan frees no parameters after a forward pass (parallelize_llama.py, `apply_fsdp`).
        reshard=not ("torchtitan" in row.text("framework") and pp > 1),
        sequence_parallel=sequence_parallel,
        micro_batch=int(micro_batch),
        global_batch=round(global_batch),
        recompute=recompute,
        cuda_graphs="cuda-graph-impl" in row.text("overlap"),
        overlap_experts=_overlaps_experts(row),
        offload_activations="activation offloading" in row.text("notes"),
        offload_optimizer="cpu_offload" in row.text("notes"),
        schedule=Schedule.INTERLEAVED if stages > 1 and pp > 1 else Schedule.ONE_F_ONE_B,
    )
