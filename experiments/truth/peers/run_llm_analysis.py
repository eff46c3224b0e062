"""Jobs by llm-analysis (Cheng Li, Apache-2.0): FLOPs at a share of the peak, one FLOP rate for all ops."""

import logging

from answers import answer
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name

logging.disable(logging.CRITICAL)
GPUS = {
    "H100 SXM": "h100-sxm-80gb",
    "A100 SXM4 80GB": "a100-sxm-80gb",
    "A100 SXM4 40GB": "a100-sxm-40gb",
    "V100 SXM2 32GB": "v100-sxm-32gb",
    "V100 SXM2 16GB": "v100-sxm-16gb",
}
RECOMPUTE = {
    "none": ActivationRecomputation.NONE,
    "selective": ActivationRecomputation.SELECTIVE,
    "full": ActivationRecomputation.FULL,
}


def step(job):
    """Its FLOP rate is that of 16 bits."""
    gpu = next((name for known, name in GPUS.items() if known in job["device"]), None)
    if gpu is None:
        raise ValueError(f"llm-analysis ships no {job['device']}")
    if job["precision"] not in ("bf16", "fp16"):
        raise ValueError(f"llm-analysis trains in 16 bits, not in {job['precision']}")
    if job["cp"] > 1:
        raise ValueError("llm-analysis has no context parallelism")
    width = job["ffn"] * (1.5 if job["gated"] else 1)  # it has two matrices a layer; three have as many FLOPs as these
    model = ModelConfig(
        name="job",
        num_layers=job["layers"],
        n_head=job["heads"],
        hidden_dim=job["hidden"],
        vocab_size=job["vocab"],
        max_seq_len=job["sequence"],
        num_key_value_heads=job["kv_heads"],
        ffn_embed_dim=width,
        expansion_ratio=width / job["hidden"],
        moe_num_experts=job.get("experts", 1),
        moe_top_k=job.get("top_k", 1),
    )
    parallel = ParallelismConfig(
        tp_size=job["tp"],
        pp_size=job["pp"],
        dp_size=job["dp"],
        ep_size=job["ep"],
        sp_size=job["tp"] if job["sequence_parallel"] else 1,
    )
    analysis = LLMAnalysis(
        model,
        get_gpu_config_by_name(gpu),
        get_dtype_config_by_name("w16a16e16"),
        parallel,
        flops_efficiency=job.get("flops_efficiency"),
    )
    found = analysis.training(
        batch_size_per_gpu=job["micro_batch"],
        gradient_accumulation_steps=job["micro_batches"],
        global_batch_size=job["global_batch"],
        seq_len=job["sequence"],
        activation_recomputation=RECOMPUTE[job["recompute"]],
        ds_zero=DSZeRO(job["zero_stage"]),
    )
    return {
        "step_s": found["latency_per_iter"],
        "memory_bytes": found["(weight+op_state+grad+act)_memory_per_gpu"],
        "limit_bytes": analysis.gpu_config.mem_per_GPU_in_GB * 1024**3,
    }


answer(step)
