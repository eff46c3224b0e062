"""`captured_job_toml`: the ``job.toml`` of a captured model, which `dpro-search capture` writes beside its graph."""

from __future__ import annotations

import json
import math

from dpro_search.cluster import parse_cluster
from dpro_search.collect.capture import CapturedGraph
from dpro_search.parallel.captured import captured_model
from dpro_search.parallel.file.description import global_batch_of
from dpro_search.parallel.strategy import ParallelSettings

FRAMEWORK = "pytorch-2"
USUAL_DEVICE = "h100"
"""The cluster of a file for which none is named; its comment says so."""


def captured_job_toml(graph: CapturedGraph, name: str, cluster: str | None) -> str:
    """A legal description: the captured mesh, with the captured batch on each replica; `name` is that of the graph's file.

    Raises
    ------
    InputError
        The cluster is not known.
    """
    ranks = math.prod(size for axis, size in graph.mesh.items() if axis != "ep")  # whose ranks are those of dp
    chosen = cluster or f"{ranks}x{USUAL_DEVICE}"
    devices = parse_cluster(chosen).ranks
    model = captured_model(graph)
    runs = _runs(graph) if devices == ranks else ParallelSettings()
    each = graph.batch * graph.micro_batches
    batch = f"batch_per_replica = {each}  # as captured; 'global_batch' in its place is that of all replicas"
    if cluster:
        batch = f"global_batch = {global_batch_of(each, runs, devices)}  # of all replicas; {graph.batch} captured"
    lines = [
        "# A captured model for dpro-search: dpro-search replay job.toml, diagnose job.toml, run job.toml",
        f"cluster = {json.dumps(chosen)}  # " + ("as given" if cluster else "not given: so many devices as the mesh has"),
        batch,
        *([f"sequence = {graph.sequence}  # tokens of a sequence"] if graph.sequence is not None else []),
        f'precision = "{graph.precision}"',
        f'framework = "{FRAMEWORK}"',
        *(f"# not split over {axis}: {why}" for axis, why in model.unsplit),
        "",
        "[model]",
        f"capture = {json.dumps(name)}  # {graph.model} of {graph.script}, PyTorch {graph.torch}",
    ]
    if devices == ranks:
        values = {"micro_batch": graph.batch, **runs.settings}
        lines += ["", "# How the captured step runs. Without this table a usual strategy that fits in memory is taken.", "[runs]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _runs(graph: CapturedGraph) -> ParallelSettings:
    """Settings of the captured mesh."""
    mesh = graph.mesh
    pipelined, rings = bool(graph.places), mesh.get("cp", 1) > 1 and graph.rotate == "alltoall"
    return ParallelSettings(
        tp=mesh.get("tp"),
        pp=mesh.get("pp"),
        cp=mesh.get("cp"),
        schedule=graph.schedule if pipelined else None,  # type: ignore[arg-type]
        virtual_stages=graph.virtual_stages if pipelined else None,
        cp_ring=True if rings else None,
        zero_stage=3 if mesh.get("dp_shard", 1) > 1 else 0,
        sequence_parallel=False if mesh.get("tp", 1) > 1 else None,
    )
