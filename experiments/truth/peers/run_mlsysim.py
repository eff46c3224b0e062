"""Jobs by mlsysim (Harvard, Apache-2.0): `DistributedModel`, FLOPs at half the peak, rings, the pipeline's bubble."""

import mlsysim
from answers import answer
from mlsysim.core.units import Q_
from mlsysim.engine.solvers import DistributedModel
from mlsysim.models.types import SparseTransformerWorkload, TransformerWorkload
from mlsysim.systems.types import Fleet, NetworkFabric, Node

GPUS = {
    "GB200": "GB200_NVL72",
    "B200": "B200",
    "H200": "H200",
    "H100 SXM": "H100",
    "A100 SXM4 80GB": "A100",
    "A100 SXM4 40GB": "A100_40GB",
    "V100 SXM2 32GB": "V100",
    "MI300X": "MI300X",
}


def step(job):
    """Hosts have the links of the job's cluster, devices the figures that the package ships."""
    gpu = next((name for known, name in GPUS.items() if known in job["device"]), None)
    if gpu is None:
        raise ValueError(f"mlsysim ships no {job['device']}")
    if job["cp"] > 1:
        raise ValueError("mlsysim has no context parallelism")
    if job["precision"] not in ("bf16", "fp16", "fp32", "fp8", "tf32"):
        raise ValueError(f"mlsysim has no {job['precision']}")
    per_host = min(job["devices_per_host"], job["devices"])
    node = Node(
        name="host",
        accelerator=getattr(mlsysim.Hardware.Cloud, gpu),
        accelerators_per_node=per_host,
        intra_node_bw=Q_(job["host_bytes_per_s"], "byte/s"),
    )
    fabric = NetworkFabric(name="network", bandwidth=Q_(job["nic_bits_per_s"] or 1e9, "bit/s"))
    fleet = Fleet(name="cluster", node=node, count=job["devices"] // per_host, fabric=fabric)
    numbers = {
        "name": "job",
        "architecture": "Transformer",
        "parameters": Q_(job["parameters"], "count"),
        "layers": job["layers"],
        "hidden_dim": job["hidden"],
        "heads": job["heads"],
        "kv_heads": job["kv_heads"],
        "vocab_size": job["vocab"],
    }
    if "experts" in job:
        model = SparseTransformerWorkload(
            **numbers,
            active_parameters=Q_(job["active_parameters"], "count"),
            experts=job["experts"],
            active_experts_per_token=job["top_k"],
        )
    else:
        model = TransformerWorkload(**numbers)
    found = DistributedModel().solve(
        model,
        fleet,
        batch_size=job["global_batch"],
        precision=job["precision"],
        tp_size=job["tp"],
        pp_size=job["pp"],
        ep_size=1,  # its ranks are apart from the data parallel ones there, and within them in these jobs
        v_stages=job["virtual_stages"],
        microbatch_count=job["micro_batches"],
        zero_stage=job["zero_stage"],
        activation_recomputation=job["recompute"] == "full",
        seq_len=job["sequence"],
    )
    memory = found.node_profile.memory_footprint
    return {
        "step_s": found.step_latency_total.m_as("s"),
        "memory_bytes": memory.m_as("byte"),
        "limit_bytes": node.accelerator.memory.capacity.m_as("byte"),
    }


answer(step)
