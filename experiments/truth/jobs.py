"""`workload_of`: the job that a published run describes, as the predictor takes it."""

from __future__ import annotations

import re
from dataclasses import replace

from dpro_search.errors import InputError
from dpro_search.graph.model import Network
from dpro_search.space.mesh import Recompute, Runtime, Schedule, Strategy, Workload
from experiments.truth.machines import cluster_of, devices_of, gpu_of
from experiments.truth.memory import rules_of, stores_scores
from experiments.truth.models import is_network, model_of, sequence_of
from experiments.truth.rows import Row

PRECISIONS = (
    (r"fp4", "fp4"),
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
    strategy, model = _strategy(row), model_of(row)
    sequence = 1 if isinstance(model, Network) else sequence_of(row)
    if not sequence:
        raise InputError("the sequence's length is not given")
    if isinstance(model, Network) and model.tables:
        strategy = replace(strategy, ep=strategy.dp)  # The ranks share the tables (hybrid parallel).
    _, runtime = next(pair for pair in RUNTIMES if re.search(pair[0], row.text("framework")))
    if "bert" in row.text("model") and row.text("source").startswith("mlperf"):
        sequence = round(sequence * BERT_FILLED)
    return Workload(
        model=model,
        sequence=sequence,
        strategy=strategy,
        cluster=cluster_of(row),
        precision=_precision(row),
        runtime=replace(runtime, memory=rules_of(row), flash_attention=runtime.flash_attention and not stores_scores(row)),
        frozen="lora" in row.text("model") or "task lora" in row.text("notes"),
    )


def _precision(row: Row) -> str:
    text = row.text("precision")
    if not text:
        return "fp16" if "v100" in row.text("gpu") else "bf16"
    found = next((name for pattern, name in PRECISIONS if re.search(pattern, text)), None)
    if found is None:
        raise InputError(f"precision {row.values['precision']}")
    if found == "fp32" and "deeplearningexamples" in row.text("source") and "a100" in gpu_of(row):
        return "tf32"  # NVIDIA's containers compute fp32 like that from Ampere on
    return found


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
    pp, cp = row.whole("pp", 1), row.whole("cp", 1)
    dp = row.whole("dp", max(devices_of(row) // (tp * pp * cp), 1))
    global_batch = row.number("global_batch")
    if not global_batch:
        raise InputError("the batch is not given")
    # A pipeline's micro-batches are of one sample where a row does not say how many there are.
    micro_batch = row.number("micro_batch") or (1 if pp > 1 else max(global_batch // (dp * row.whole("grad_accum", 1)), 1))
    if is_network(row):  # of batches that are not divided evenly, the mean
        micro_batch = max(round(global_batch / (dp * row.whole("grad_accum", 1))), 1)
        global_batch = micro_batch * dp * row.whole("grad_accum", 1)
    if not float(micro_batch).is_integer():
        raise InputError(f"micro-batch {micro_batch:g}")
    return Strategy(
        dp=dp,
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
