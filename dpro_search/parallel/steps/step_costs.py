"""`StepCosts`: what the parts of a step take, and `structure_of`: all of it that decides which ops a step has.

Steps of one structure have the same graph, so that it is built once for many costs; `StepPart` names the part of the costs that an
op takes, and `part_us` says how long that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dpro_search.parallel.steps.pipeline import Direction


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of a layer on a rank for one micro-batch. Passes contain the tensor-, context- and expert-parallel collectives."""

    forward_us: float
    backward_us: float  # With what is computed again.
    weights_us: float = 0.0  # Part of `backward_us`: gradients of weights, which no other stage waits for.
    # Part of each pass in which the rank waits in collectives; only where ranks share cores.
    waits_forward_us: float = 0.0
    waits_backward_us: float = 0.0
    gather_us: float = 0.0  # All-gather of its parameters.
    reduce_us: float = 0.0  # All-reduce or reduce-scatter of its gradients.

    def pass_us(self, direction: Direction) -> float:
        """Duration of the layer in one pass, in microseconds."""
        if direction == "F":
            return self.forward_us
        return {"B": self.backward_us, "I": self.backward_us - self.weights_us, "W": self.weights_us}[direction]

    def waits_us(self, direction: Direction) -> float:
        """Time of a pass in which the rank does not compute."""
        return {"F": self.waits_forward_us, "W": 0.0}.get(direction, self.waits_backward_us)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of the parts of a step.

    A stage's collectives of parameters overlap with its first forward pass, or with every pass where parameters are freed between
    passes; those of gradients overlap with its last backward pass, or with every one where no rank holds a sum of whole gradients.
    """

    stages: tuple[tuple[LayerCosts, ...], ...]  # Layers of each stage.
    send_us: float = 0.0  # Activations, or their gradients, of a micro-batch from one stage to the next.
    update_us: tuple[float, ...] = ()  # The optimizer's work on each rank; empty: none.
    tied_us: float = 0.0  # All-reduce of the gradients of an embedding of which the first and the last stage have a copy.
    copies: int = 1  # Copies of each stage: the second half of `stages` equals the first, with other micro-batches.
    copies_us: float = 0.0  # All-reduce of the gradients of both copies.
    shared_us: float = 0.0  # On every rank after its last pass: all-reduce of gradients of which tensor parallel ranks have parts.
    norm_us: float = 0.0  # All-reduce of the gradients' norm over all ranks; no rank updates before it.
    gathers_every_pass: bool = False  # Whether layers gather their parameters for every pass (ZeRO-3), or once.
    regather: bool = True  # With `gathers_every_pass`: gather again for the backward pass.
    reduces_every_pass: bool = False  # Whether layers reduce their gradients after every backward pass (ZeRO-2 and 3), or the last.
    prefetch: int = 1  # Layers whose parameters are gathered ahead.
    overlap: bool = True  # False: gradients are reduced after the last pass, and parameters gathered after the update.
    overlap_gathers: bool = True  # False: parameters are gathered after the update, though gradients are reduced beside passes.
    slowed: float = 0.0  # Fraction of an overlapping collective's duration by which compute is slowed down.
    overlap_send: bool = True  # False: a rank computes nothing while it sends.
    blocking: bool = False  # A rank computes nothing while it exchanges parameters or gradients.
    receives: bool = False  # A rank computes nothing while it receives, and a message begins when both sides have come to it.
    # The core of each pipeline rank, and how many ranks of its stage share it; empty: each has a core for itself.
    cores: tuple[tuple[int, int], ...] = ()


class LayerShape(NamedTuple):
    """Which exchanges a layer has."""

    gathers: bool
    reduces: bool
    waits_forward: bool
    waits_backward: bool

    def waits(self, direction: Direction) -> bool:
        """Whether the rank waits in collectives of a pass."""
        return {"F": self.waits_forward, "W": False}.get(direction, self.waits_backward)


class StepStructure(NamedTuple):
    """The properties that decide which ops a step has, beside the order of passes: fields of `StepCosts`, or whether they are 0."""

    stages: tuple[tuple[LayerShape, ...], ...]
    sends: bool
    updates: bool
    tied: bool
    copies: int
    sums_copies: bool
    sums_shared: bool
    sums_norms: bool
    gathers_every_pass: bool
    regather: bool
    reduces_every_pass: bool
    prefetch: int
    overlap: bool
    overlap_gathers: bool
    overlap_send: bool
    blocking: bool
    receives: bool
    cores: tuple[tuple[int, int], ...]


StepPartName = Literal[
    "computes", "waits", "send", "gather", "reduce", "reduces", "gathers", "update", "copies", "shared", "tied", "norm"
]  # fmt: skip


class StepPart(NamedTuple):
    """The part of a step's costs that an op takes.

    Attributes
    ----------
    rank
        The pipeline rank; -1: the part is the same on all.
    stages
        Its stages: one, or those whose layers are exchanged together.
    layer
        The number of the layer in its stage; -1: all layers.
    direction
        The pass; "": none.
    beside_gather
        Whether the layer's parameters are gathered beside it, which slows it down.
    """

    name: StepPartName
    rank: int = -1
    stages: tuple[int, ...] = ()
    layer: int = -1
    direction: Direction | Literal[""] = ""
    beside_gather: bool = False


def structure_of(costs: StepCosts) -> StepStructure:
    """The structure of a step with these costs."""
    shapes: dict[int, tuple[LayerShape, ...]] = {}  # by identity of a stage's layers, which many stages have in common
    for layers in costs.stages:
        if id(layers) not in shapes:
            shapes[id(layers)] = tuple(
                LayerShape(bool(one.gather_us), bool(one.reduce_us), bool(one.waits_forward_us), bool(one.waits_backward_us))
                for one in layers
            )
    return StepStructure(
        stages=tuple(shapes[id(layers)] for layers in costs.stages),
        sends=bool(costs.send_us),
        updates=bool(costs.update_us),
        tied=bool(costs.tied_us),
        copies=costs.copies,
        sums_copies=bool(costs.copies_us),
        sums_shared=bool(costs.shared_us),
        sums_norms=bool(costs.norm_us),
        gathers_every_pass=costs.gathers_every_pass,
        regather=costs.regather,
        reduces_every_pass=costs.reduces_every_pass,
        prefetch=costs.prefetch,
        overlap=costs.overlap,
        overlap_gathers=costs.overlap_gathers,
        overlap_send=costs.overlap_send,
        blocking=costs.blocking,
        receives=costs.receives,
        cores=costs.cores,
    )


def part_us(costs: StepCosts, part: StepPart) -> float:
    """Duration of a part, in microseconds. Ranks of a stage that share a core compute one after the other."""
    layers = [layer for stage in part.stages for layer in costs.stages[stage]]
    match part.name:
        case "computes":
            total_us, waits_us = _computed_us(costs, part, layers)
            return (total_us - waits_us) * costs.cores[part.rank][1] if costs.cores else total_us
        case "waits":
            return _computed_us(costs, part, layers)[1]
        case "gather":
            return layers[part.layer].gather_us
        case "reduce":
            return layers[part.layer].reduce_us
        case "gathers":
            return sum(layer.gather_us for layer in layers)
        case "reduces":
            return sum(layer.reduce_us for layer in layers)
        case "update":
            return costs.update_us[part.rank] * (costs.cores[part.rank][1] if costs.cores else 1)
        case "send":
            return costs.send_us
        case "copies":
            return costs.copies_us
        case "shared":
            return costs.shared_us
        case "tied":
            return costs.tied_us
        case "norm":
            return costs.norm_us


def _computed_us(costs: StepCosts, part: StepPart, layers: Sequence[LayerCosts]) -> tuple[float, float]:
    """Duration of a pass, and the time of it in which the rank waits in collectives: through a stage, or through one layer."""
    assert part.direction, "a part that computes is one of a pass"
    direction = part.direction
    if part.layer < 0:
        return sum(layer.pass_us(direction) for layer in layers), sum(layer.waits_us(direction) for layer in layers)
    layer = layers[part.layer]
    gather_us = layer.gather_us if part.beside_gather else 0.0
    reduce_us = layer.reduce_us if direction in "BW" else 0.0
    slower_us = 0.0 if costs.blocking else costs.slowed * (gather_us + reduce_us)
    return layer.pass_us(direction) + slower_us, layer.waits_us(direction)
