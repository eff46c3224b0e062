"""`workload_of`: the job that a published run describes, as the predictor takes it."""

from __future__ import annotations

import re
from dataclasses import replace

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.errors import InputError
from dpro_search.space.mesh import Recompute, Runtime, Schedule, Strategy, Workload
from experiments.truth.memory import rules_of, stores_scores
from experiments.truth.models import model_of
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
PRECISIONS = (
    (r"nvfp4|fp4", None),
    (r"fp8", "fp8"),
    (r"bf16", "bf16"),
    (r"fp16|amp|mixed", "fp16"),
    (r"tf32", "tf32"),
    (r"fp32", "fp32"),
)
EAGER_US = 800.0  # Of the host, to start a layer's forward pass in a framework without fused kernels or CUDA graphs (estimated).
BERT_FILLED = (
    0.5  # Of the tokens of MLPerf's BERT sequences; the rest is padding, which submissions take out (MLPerf training, BERT).
)
RUNTIMES = (  # name of a framework in a row -> how it runs a step
    (r"nanotron", Runtime(name="nanotron", layer_host_us=EAGER_US, overlap_sends=False, stages_by_cost=True)),
    (r"fsdp", Runtime(name="PyTorch FSDP", layer_host_us=EAGER_US, gradient_bytes=2.0)),
    (
        r"megatron-deepspeed",
        Runtime(
            name="Megatron-DeepSpeed", layer_host_us=EAGER_US, overlap_gradients=False, flash_attention=False, overlap_sends=False
        ),
    ),
    (r"hf transformers", Runtime(name="PyTorch, eager", layer_host_us=EAGER_US, flash_attention=False)),
    (r"", Runtime()),
)


def workload_of(row: Row) -> Workload:
    """The job of a row; raises `InputError` with the reason where it is not one that can be predicted."""
    strategy, sequence = _strategy(row), row.whole("seq_len", 0)
    model = model_of(row)
    if not sequence:
        raise InputError("the sequence's length is not given")
    _, runtime = next(pair for pair in RUNTIMES if re.search(pair[0], row.text("framework")))
    if "bert" in row.text("model") and row.text("source").startswith("mlperf"):
        sequence = round(sequence * BERT_FILLED)
    return Workload(
        model=model,
        sequence=sequence,
        strategy=strategy,
        cluster=_cluster(row),
        precision=_precision(row),
        runtime=replace(runtime, memory=rules_of(row), flash_attention=runtime.flash_attention and not stores_scores(row)),
        frozen="lora" in row.text("model") or "task lora" in row.text("notes"),
    )


def _cluster(row: Row) -> Cluster:
    name = next((machine for pattern, machine in MACHINES if re.search(pattern, row.text("gpu"))), None)
    if name is None:
        raise InputError(f"no bundled machine has the GPU {row.values['gpu'] or '(none)'}")
    if "efa" in row.text("inter_net") and name == "hgx-h100":
        name = "p5.48xlarge"
    if re.search(r"pcie", row.text("gpu")) and name != "l40s-pcie-8":
        raise InputError(f"no bundled machine has the GPU {row.values['gpu']}")
    ranks = _devices(row)
    hosts = max(-(-ranks // row.whole("gpus_per_node", 8)), 1)
    return parse_cluster(f"{hosts}x{name}")


def _precision(row: Row) -> str:
    text = row.text("precision")
    if not text:
        return "fp16" if "v100" in row.text("gpu") else "bf16"
    found = next(((pattern, name) for pattern, name in PRECISIONS if re.search(pattern, text)), None)
    if found is None or found[1] is None:
        raise InputError(f"precision {row.values['precision']}")
    return found[1]


def _devices(row: Row) -> int:
    """Megatron-LM's tests run on one host of 8 where they do not say it, of 4 where their name says so."""
    named = re.search(r"1n(\d)g", row.text("model"))
    host = int(named.group(1)) if named else 4 if "1node" in row.text("model") and "gb200" in row.text("gpu") else 8
    return row.whole("n_gpus", host if "golden" in row.text("source") else 1)


def _expert_width(row: Row, tp: int) -> int:
    """Tensor parallel degree of experts: in Megatron-LM that of the model, unless it is named; recipes of NeMo name 1."""
    if "golden" not in row.text("source") or not row.number("experts"):
        return 1
    named = re.search(r"etp(\d+)", row.text("model"))
    return int(named.group(1)) if named else tp


def _default_stage(row: Row) -> int:
    """NeMo's recipes split the optimizer state; Megatron-LM's tests say where they do."""
    if "golden" in row.text("source"):
        return 1 if "distributed-optimizer" in row.text("zero_stage") else 0
    return 1 if re.search(r"nemo|megatron-core", row.text("framework")) else 0


def _strategy(row: Row) -> Strategy:
    zero = row.text("zero_stage")
    fsdp = "full_shard" in zero or bool(re.match(r"fsdp=[1-9]", zero))
    found = re.match(r"[0-3]$", zero)
    stage = 3 if fsdp else int(found.group()) if found else _default_stage(row)
    recompute = {"full": Recompute.FULL, "selective": Recompute.SELECTIVE}.get(row.text("recompute"), Recompute.NONE)
    stages, tp = row.whole("vpp", 1), row.whole("tp", 1)
    given = row.number("sequence_parallel")
    sequence_parallel = tp > 1 and (bool(given) if given is not None else "deepspeed" not in row.text("framework"))
    micro_batch = row.number("micro_batch")
    global_batch = row.number("global_batch")
    if not micro_batch or not global_batch:
        raise InputError("the batch is not given")
    if not float(micro_batch).is_integer():
        raise InputError(f"micro-batch {micro_batch:g}")
    pp, cp = row.whole("pp", 1), row.whole("cp", 1)
    return Strategy(
        dp=row.whole("dp", max(_devices(row) // (tp * pp * cp), 1)),
        etp=_expert_width(row, tp),
        tp=tp,
        pp=row.whole("pp", 1),
        cp=row.whole("cp", 1),
        ep=row.whole("ep", 1),
        virtual_stages=stages if row.whole("pp", 1) > 1 else 1,
        zero_stage=stage,
        sequence_parallel=sequence_parallel,
        micro_batch=int(micro_batch),
        global_batch=round(global_batch),
        recompute=recompute,
        schedule=Schedule.INTERLEAVED if stages > 1 and row.whole("pp", 1) > 1 else Schedule.ONE_F_ONE_B,
    )
