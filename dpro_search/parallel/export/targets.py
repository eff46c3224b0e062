"""`parallel_targets`: what plans of parallel jobs are exported to."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.deploy.parts.part import Target
from dpro_search.parallel.export.accelerate import accelerate_part
from dpro_search.parallel.export.deepspeed import deepspeed_part
from dpro_search.parallel.export.megatron import bridge_part, megatron_part
from dpro_search.parallel.export.nccl import nccl_part
from dpro_search.parallel.export.pytorch import pytorch_part
from dpro_search.parallel.export.torchtitan import torchtitan_part

_PARTS = {
    "torchtitan": torchtitan_part,
    "megatron": megatron_part,
    "megatron-bridge": bridge_part,
    "deepspeed": deepspeed_part,
    "accelerate": accelerate_part,
    "pytorch": pytorch_part,
}


def parallel_targets(fields: Sequence[str]) -> tuple[Target, ...]:
    """The targets; `fields` are the settings that a plan has. What one cannot express of a plan, it refuses by its value.

    NCCL's settings go with those of a framework.
    """
    frameworks = (Target(name=name, fields=tuple(fields), part=part, communicates=True) for name, part in _PARTS.items())
    why = dict.fromkeys(fields, "NCCL's settings say how a plan's groups communicate: name the framework that makes them as well")
    return (*frameworks, Target(name="nccl", fields=(), part=nccl_part, why_not=why))
