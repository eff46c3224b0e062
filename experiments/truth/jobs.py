"""`workload_of`: the job that a published run describes, as the predictor takes it."""

from __future__ import annotations

import re
from dataclasses import replace

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.costmodel.gpu_ops import AttentionKernels
from dpro_search.errors import InputError
from dpro_search.graph.model import Architecture, Attention, FeedForward, Layer, Positions, published
from dpro_search.kinds.mesh.frameworks import FRAMEWORKS
from dpro_search.space.mesh import Recompute, Runtime, Schedule, Strategy, Workload
from experiments.truth.rows import Row

# Name of a GPU in a row -> bundled machine; the first that is found in the row's name counts.
MACHINES = (
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"b300", "hgx-b300"),
    (r"b200", "hgx-b200"),
    (r"h200", "hgx-h200"),
    (r"h100", "hgx-h100"),
    (r"a100.*40", "dgx-a100-40"),
    (r"a100", "dgx-a100-80"),
    (r"v100.*16", "dgx-1-v100"),
    (r"v100", "jean-zay-v100"),
    (r"mi300x", "mi300x-platform"),
    (r"l40s", "l40s-pcie-8"),
)
MODELS = (  # name in a row -> bundled architecture
    (r"llama ?-?3(\.1)?[ _]405b", "llama3-405b"),
    (r"llama ?-?3(\.1)?[ _-]70b", "llama3-70b"),
    (r"llama ?-?3(\.1)?[ _-]8b", "llama3-8b"),
    (r"deepseek ?-?v3", "deepseek-v3"),
    (r"kimi[_ -]k2", "kimi-k2"),
    (r"qwen3[_ -]30b", "qwen3-30b-a3b"),
    (r"qwen3[_ -]235b", "qwen3-235b-a22b"),
    (r"gpt[_ -]oss[_ -]120b", "gpt-oss-120b"),
    (r"gpt[_ -]oss[_ -]20b", "gpt-oss-20b"),
    (r"mixtral[_ -]8x7b", "mixtral-8x7b"),
    (r"mixtral[_ -]8x22b", "mixtral-8x22b"),
)
PRECISIONS = (
    (r"nvfp4|fp4", None),
    (r"fp8", "fp8"),
    (r"bf16", "bf16"),
    (r"fp16|amp|mixed", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32", "fp32"),
)
DROPOUT = 0.1  # Default of Megatron-LM, and of GPT-2, OPT and BERT in Hugging Face's library.
BERT_FILLED = (
    0.5  # Of the tokens of MLPerf's BERT sequences; the rest is padding, which submissions take out (MLPerf training, BERT).
)
FRAMEWORK_NAMES = (  # name of a framework in a row -> the package's name
    (r"nanotron", "nanotron"),
    (r"fsdp", "fsdp"),
    (r"megatron-deepspeed", "megatron-deepspeed"),
    (r"hf transformers", "pytorch"),
    (r"", "megatron-core"),
)


def workload_of(row: Row) -> Workload:
    """The job of a row; raises `InputError` with the reason where it is not one that can be predicted."""
    strategy, sequence = _strategy(row), row.whole("seq_len", 0)
    model = _model(row)
    if not sequence:
        raise InputError("the sequence's length is not given")
    if "bert" in row.text("model") and row.text("source").startswith("mlperf"):
        sequence = round(sequence * BERT_FILLED)
    return Workload(
        model=model,
        sequence=sequence,
        strategy=strategy,
        cluster=_cluster(row),
        precision=_precision(row),
        runtime=runtime_of(row),
        frozen="lora" in row.text("model") or "task lora" in row.text("notes"),
    )


def runtime_of(row: Row) -> Runtime:
    """How the framework of a row runs a step."""
    name = next(name for pattern, name in FRAMEWORK_NAMES if re.search(pattern, row.text("framework")))
    if row.text("source").startswith("mlperf"):
        name = "megatron-core-cuda-graphs"  # Submissions to MLPerf training capture layers as CUDA graphs.
    runtime = FRAMEWORKS[name].runtime
    if "foundry" in row.text("framework"):  # Its attention of 2023.
        return replace(runtime, kernels=replace(runtime.kernels, attention=AttentionKernels.FLASH_TRITON))
    return runtime


Kind = tuple[str, str]  # machine and framework


def kind_of(row: Row) -> Kind:
    """GPU and framework of a row, without their versions and variants."""
    machine = next((name for pattern, name in MACHINES if re.search(pattern, row.text("gpu"))), "")
    return machine, runtime_of(row).name


def _cluster(row: Row) -> Cluster:
    name = next((machine for pattern, machine in MACHINES if re.search(pattern, row.text("gpu"))), None)
    if name is None:
        raise InputError(f"no bundled machine has the GPU {row.values['gpu'] or '(none)'}")
    if "efa" in row.text("inter_net") and name == "hgx-h100":
        name = "p5.48xlarge"
    if re.search(r"pcie", row.text("gpu")) and name != "l40s-pcie-8":
        raise InputError(f"no bundled machine has the GPU {row.values['gpu']}")
    ranks = row.whole("n_gpus", 1)
    hosts = max(-(-ranks // row.whole("gpus_per_node", 8)), 1)
    return parse_cluster(f"{hosts}x{name}")


def _precision(row: Row) -> str:
    text = row.text("precision")
    if not text:
        # Megatron-Bridge's tables without a precision are those in fp8: Llama 3 8B takes as long as in rows that say so.
        bridge = "bridge" in row.text("source")
        return "fp8" if bridge else "fp16" if "v100" in row.text("gpu") else "bf16"
    found = next(((pattern, name) for pattern, name in PRECISIONS if re.search(pattern, text)), None)
    if found is None or found[1] is None:
        raise InputError(f"precision {row.values['precision']}")
    return found[1]


def _model(row: Row) -> Architecture:
    if row.number("layers") and row.number("hidden") and not row.number("experts"):
        return _described(row)
    name = next((name for pattern, name in MODELS if re.search(pattern, row.text("model"))), None)
    if name is None:
        raise InputError(f"model {row.values['model']}: neither its dims are given nor is it a transformer that is bundled")
    return published(name)


def _described(row: Row) -> Architecture:
    hidden, heads = row.whole("hidden", 0), row.whole("heads", 1)
    kind = row.text("model")
    gated = bool(re.search(r"llama|mistral|qwen|nemotron-h", kind))
    bert = "bert" in kind
    old = bool(re.search(r"gpt|opt|bert", kind))
    attention = Attention(heads=heads, kv_heads=row.whole("kv_heads", heads), head_dim=hidden // heads, bias=old, causal=not bert)
    tied = row.number("tied_embeddings")
    return Architecture(
        name=row.values["model"],
        hidden=hidden,
        vocab=row.whole("vocab", 50257 if old else 32000),
        layers=(
            Layer(
                count=row.whole("layers", 1),
                attention=attention,
                feed_forward=FeedForward(hidden=row.whole("ffn_hidden", 4 * hidden), gated=gated, bias=old),
            ),
        ),
        positions=Positions.LEARNED if old else Positions.ALIBI if "mpt" in kind else Positions.ROTARY,
        max_positions=row.whole("seq_len", 0),
        tied=old if tied is None else bool(tied),
        norm_bias=old,
        dropout=DROPOUT if old and re.search("megatron-deepspeed|transformers", row.text("framework")) else 0.0,
    )


def _usual_virtual_stages(row: Row, pp: int) -> int:
    """Of submissions to MLPerf that do not give them: as those that do, a layer each."""
    per_stage, left = divmod(row.whole("layers", 1), pp)
    return 1 if left or not row.text("source").startswith("mlperf") else per_stage


def _strategy(row: Row) -> Strategy:
    zero = row.text("zero_stage")
    fsdp = "full_shard" in zero or (zero.startswith("fsdp=") and not zero.startswith(("fsdp=0", "fsdp=1")))
    found = re.match(r"[0-3]$", zero)
    stage = 3 if fsdp else int(found.group()) if found else 1 if re.search(r"nemo|megatron-core", row.text("framework")) else 0
    recompute = {"full": Recompute.FULL, "selective": Recompute.SELECTIVE}.get(row.text("recompute"), Recompute.NONE)
    tp, pp = row.whole("tp", 1), row.whole("pp", 1)
    stages = row.whole("vpp", _usual_virtual_stages(row, pp))
    given = row.number("sequence_parallel")
    sequence_parallel = tp > 1 and (bool(given) if given is not None else "deepspeed" not in row.text("framework"))
    micro_batch = row.number("micro_batch")
    global_batch = row.number("global_batch")
    if not micro_batch or not global_batch:
        raise InputError("the batch is not given")
    if not float(micro_batch).is_integer():
        raise InputError(f"micro-batch {micro_batch:g}")
    return Strategy(
        dp=row.whole("dp", 1),
        tp=tp,
        pp=pp,
        cp=row.whole("cp", 1),
        ep=row.whole("ep", 1),
        virtual_stages=stages if pp > 1 else 1,
        zero_stage=stage,
        sequence_parallel=sequence_parallel,
        micro_batch=int(micro_batch),
        global_batch=round(global_batch),
        recompute=recompute,
        schedule=Schedule.INTERLEAVED if stages > 1 and pp > 1 else Schedule.ONE_F_ONE_B,
    )
