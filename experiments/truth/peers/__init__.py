"""Other people's predictors of training steps, as their packages ship them, on the same rows.

Each runs in the environment of peers (``scripts/make_env.sh peers``), apart from this package: a script in this folder reads jobs,
one JSON object a line, and answers each with a line. Nothing of the packages is copied here, and nothing is set but what they ask
for.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.parallel.model import Experts, Network, parameters_of
from dpro_search.parallel.workload import Workload
from experiments.truth.jobs import workload_of
from experiments.truth.rows import Row
from experiments.truth.score import Predict, Predicted

PEERS = {
    "llm-analysis": ("run_llm_analysis.py", {}),
    # Of the peak, what its authors say that Megatron-LM achieves (llm_analysis/constant.py); it ships with 1.
    "llm-analysis-half": ("run_llm_analysis.py", {"flops_efficiency": 0.5}),
    "mlsysim": ("run_mlsysim.py", {}),
}
"""Script and settings of each."""


def predictor(name: str) -> Predict:
    """A peer as a predictor of rows.

    Raises
    ------
    MissingCapabilityError
        It is not installed. One line says how to get it.
    """
    script, settings = PEERS[name]
    process = _started(script)

    def predict(row: Row) -> Predicted:
        answer = _asked(process, {**described(workload_of(row)), **settings})
        memory_bytes, limit_bytes = answer.get("memory_bytes"), answer.get("limit_bytes")
        return Predicted(answer["step_s"], memory_bytes, memory_bytes is None or limit_bytes is None or memory_bytes <= limit_bytes)

    return predict


def described(workload: Workload) -> dict[str, Any]:
    """A job as a peer's script takes it: numbers and names only."""
    model, plan, cluster = workload.model, workload.strategy, workload.cluster
    if isinstance(model, Network):
        raise InputError("no transformer")
    if len(model.layers) > 1:
        raise InputError("layers that differ")
    (layer,) = model.layers
    attention, feed_forward = layer.attention, layer.feed_forward
    host = cluster.groups[0].host
    found: dict[str, Any] = {
        "layers": layer.count,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "ffn": feed_forward.hidden,
        "gated": feed_forward.gated,
        "parameters": parameters_of(model),
        "sequence": workload.sequence,
        "precision": workload.precision,
        "device": host.device.name,
        "hosts": cluster.hosts,
        "devices": plan.devices,
        "devices_per_host": host.devices,
        "host_bytes_per_s": host.ring_bps(range(host.devices)) / 8,
        "nic_bits_per_s": host.nics.link.rate_bps if host.nics else None,
        "recompute": plan.recompute.value,
        "micro_batches": plan.micro_batches,
    }
    names = ("dp", "tp", "pp", "cp", "ep", "virtual_stages", "zero_stage", "sequence_parallel", "micro_batch", "global_batch")
    found |= {name: getattr(plan, name) for name in names}
    if isinstance(feed_forward, Experts):
        matrices = 3 if feed_forward.gated else 2
        idle = layer.count * (feed_forward.count - feed_forward.top_k) * matrices * model.hidden * feed_forward.hidden
        found |= {"experts": feed_forward.count, "top_k": feed_forward.top_k, "active_parameters": found["parameters"] - idle}
    return found


@cache
def _started(script: str) -> subprocess.Popen[str]:
    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    python = root / "peers" / "bin" / "python"
    if not python.is_file():
        raise MissingCapabilityError(f"no peers at {python}: build them with scripts/make_env.sh peers")
    command = [str(python), str(Path(__file__).with_name(script))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _asked(process: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise MissingCapabilityError("the peer's package does not start: build it again with scripts/make_env.sh peers")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise InputError(answer["error"])
    return answer
