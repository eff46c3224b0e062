"""Networks as lists of gradient tensors, and the moments of a step at which these come into being.

``networks.json`` has shapes and multiplications of keras.applications at the published inputs (`in_job/keras_networks.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PIECES = 32  # of a backward pass, at most
FORWARD = 1 / 3  # of a step: the backward pass multiplies twice as much


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network; `tensors`: (elements, multiplications for an image) in the order of the forward pass."""

    name: str
    pixels: int
    tensors: tuple[tuple[int, float], ...]

    @property
    def size_bytes(self) -> int:
        """Of all gradients in float32."""
        return 4 * sum(elements for elements, _ in self.tensors)

    @property
    def multiplications(self) -> float:
        """For an image, forward."""
        return sum(each for _, each in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of one worker that exchanges nothing.

    Attributes
    ----------
    waits_us
        Of the forward pass, and of each piece of the backward pass.
    moments
        Elements of the gradients that are there at the end of each piece.
    """

    waits_us: tuple[float, ...]
    moments: tuple[tuple[int, ...], ...]

    @property
    def compute_us(self) -> float:
        """Of the whole step."""
        return sum(self.waits_us)

    @property
    def size_bytes(self) -> int:
        """Of all gradients."""
        return 4 * sum(map(sum, self.moments))


@cache
def networks() -> dict[str, Network]:
    """By name, from most to least multiplications a byte."""
    found = json.loads(Path(__file__).with_name("networks.json").read_text())["networks"]
    return {
        name: Network(
            name=name, pixels=one["pixels"], tensors=tuple((math.prod(shape), float(count)) for shape, count in one["tensors"])
        )
        for name, one in found.items()
    }


def step_of(network: Network, compute_us: float, pieces: int = PIECES) -> Step:
    """A step that computes for so long: time goes with multiplications, gradients come from the last layer to the first.

    Pieces are cut at equal times; one that would have no gradient is joined to the next.
    """
    backward_us = compute_us * (1 - FORWARD)
    waits, moments = [compute_us * FORWARD], []
    some: list[int] = []
    done = passed = 0.0
    for elements, count in reversed(network.tensors):
        some.append(elements)
        done += count
        at = done / network.multiplications
        if at >= (len(moments) + 1) / pieces or at >= 1:
            waits.append((at - passed) * backward_us)
            moments.append(some)
            some, passed = [], at
    if some and moments:
        moments[-1] += some
    return Step(waits_us=tuple(waits), moments=tuple(map(tuple, moments)))


def ready(step: Step) -> Sequence[tuple[float, tuple[int, ...]]]:
    """(us since the start of the step, elements of the gradients) of each moment."""
    found, at = [], step.waits_us[0]
    for wait_us, some in zip(step.waits_us[1:], step.moments, strict=True):
        at += wait_us
        found.append((at, some))
    return found
