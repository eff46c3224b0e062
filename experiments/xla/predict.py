"""Times of published runs by the programs that were compiled for them: `predicted(row)`.

A row's published figure is its TFLOP/s or its step time, and the two are the same for a program whose operations are those that the
row counts. For the two models of the table of 2023 (`published._TABLE_OF_2023`) the published TFLOP/s are taken over the operations
of the model that was run, by MaxText's formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from dpro_search.cluster import parse_cluster
from dpro_search.costmodel.collectives import torus
from dpro_search.costmodel.collectives.torus_groups import places_of, spans_of
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.hlo import instruction_work
from dpro_search.kinds.xla.job import XlaJob
from dpro_search.kinds.xla.program import read_program
from dpro_search.space.scenario import Scenario
from experiments.xla.published import Request, Row, request_of
from experiments.xla.recipes import DATA_PARALLEL_OVERLAP

PARTS = ("matrix", "kernel", "other", "exposed_communication", "exposed_copies")


@dataclass(frozen=True, kw_only=True)
class SliceStep:
    """A step of the program of one slice.

    Attributes
    ----------
    step_us
        How long it takes.
    backward_us
        The part of it that the core spends on the backward pass.
    parts_us
        By `PARTS`: instructions with matrix products, Pallas kernels, all other instructions, and what the core waits for.
    needed_bytes, available_bytes
        Memory of a chip that the compiler allocated, and that it has.
    """

    step_us: float
    backward_us: float
    parts_us: dict[str, float]
    needed_bytes: int
    available_bytes: float


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A row beside its prediction, in seconds."""

    row: Row
    slice: SliceStep
    between_slices_s: float
    measured_s: float

    @property
    def predicted_s(self) -> float:
        return self.slice.step_us / 1e6 + self.between_slices_s

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def measured_mfu(self) -> float:
        return float(self.row["mfu_pct"])

    @property
    def predicted_mfu(self) -> float:
        return self.measured_mfu * self.measured_s / self.predicted_s


def predicted(row: Row) -> Predicted | None:
    """The prediction of a row; None if its program was not compiled."""
    request = request_of(row)
    step = slice_step(request) if request.folder.exists() else None
    if step is None:
        return None
    return Predicted(
        row=row, slice=step, between_slices_s=between_slices_s(row, request, step), measured_s=measured_s(row, request)
    )


def measured_s(row: Row, request: Request) -> float:
    """The published step time, for the operations of the model as it was run."""
    return float(row["step_time_s"]) * model_flops(request.config) / row_flops(row)


def row_flops(row: Row) -> float:
    """Operations of a chip and a step that the row's own dimensions have: those over which its step time was derived."""
    config = {**request_of(row).config}
    if row["source"] == "maxtext-readme-v4":
        config |= {"head_dim": 128, "gated": True}
    return model_flops(config)


def model_flops(config: dict[str, object]) -> float:
    """MaxText's model FLOPs of a step of one chip: 6 weights tokens + 12 layers batch sequence^2 heads head_dim."""
    values = {name: value for name, value in config.items() if isinstance(value, int)}
    tokens = values["per_device_batch"] * values["sequence"]
    width = values["heads"] * values["head_dim"]
    return 6.0 * weights(config) * tokens + 12.0 * values["layers"] * tokens * values["sequence"] * width


def weights(config: dict[str, object]) -> float:
    """Weights of the products of a model, with its embedding and logits."""
    values = {name: int(value) for name, value in config.items() if isinstance(value, int)}
    width, keys = values["heads"] * values["head_dim"], values["kv_heads"] * values["head_dim"]
    layer = values["hidden"] * (2 * width + 2 * keys + (3 if values["gated"] else 2) * values["ffn_hidden"])
    return float(values["layers"] * layer + tables(config))


def tables(config: dict[str, object]) -> float:
    """Weights of the embedding, and of the logits if they are others."""
    values = {name: int(value) for name, value in config.items() if isinstance(value, int)}
    return float((1 if values["tied"] else 2) * values["vocab"] * values["hidden"])


def between_slices_s(row: Row, request: Request, step: SliceStep) -> float:
    """The gradients' all-reduce between slices, as far as nothing hides it.

    Gradients are in fp32. With the flags of data-parallel overlap the gradients of layers are exchanged during the rest of the
    backward pass, and those of the embedding and the logits behind it; without them, all are exchanged behind it.
    """
    if row.slices == 1:
        return 0.0
    cluster = parse_cluster(f"{row.slices}x{request.on}")
    assert cluster.torus is not None, "a topology"
    chips = row.chips_per_slice
    groups = [[chip + number * chips for number in range(row.slices)] for chip in range(chips)]
    spans = spans_of(cluster.torus, places_of(cluster.torus), groups)

    def all_reduce_s(count: float) -> float:
        return float(torus.collective_us("all_reduce", 4 * count / chips, cluster, spans)) / 1e6

    last = tables(request.config)
    layers_s = all_reduce_s(weights(request.config) - last)
    if DATA_PARALLEL_OVERLAP in request.flags:
        layers_s = max(layers_s - step.backward_us / 1e6, 0.0)
    return layers_s + all_reduce_s(last)


@cache
def _slice_step(folder: str) -> SliceStep:
    program = read_program(Path(folder))
    assert program is not None, "a captured folder"
    assert program.facts.memory is not None, "TPUs state it"
    job = XlaJob(program)
    lowered = job.lower(Scenario())
    times = lowered.replayable.iterations(detailed=True)
    step = job.step_in(Scenario())
    durations, core = step.graph.duration_us, step.graph.device == 0
    custom = np.array([op.basis == "custom call" for op in step.ops])
    computations = {id(each): one for one in program.module.computations.values() for each in one}
    works = [instruction_work(program.module, computations[id(op.instruction)], op.instruction) for op in step.ops]
    products = np.array([work.matrix_flops > 0 for work in works])
    parts = {
        "matrix": durations[core & products & ~custom].sum(),
        "kernel": durations[core & custom].sum(),
        "other": durations[core & ~products & ~custom].sum(),
        "exposed_communication": times.breakdown_us["exposed_communication"],
        "exposed_copies": times.breakdown_us["exposed_copies"],
    }
    cluster = job.cluster_in(Scenario())
    return SliceStep(
        step_us=times.iteration_us,
        backward_us=float(durations[core & (step.graph.op_kind == OpKind.BACKWARD)].sum()),
        parts_us={name: float(value) for name, value in parts.items()},
        needed_bytes=program.facts.memory.peak_bytes,
        available_bytes=cluster.groups[0].host.device.memory_bytes or 0.0,
    )


def slice_step(request: Request) -> SliceStep:
    return _slice_step(str(request.folder))
