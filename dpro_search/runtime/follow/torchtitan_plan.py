"""A torchtitan recipe that follows a plan; lies beside `torchtitan_plan.json`, with its folder on PYTHONPATH:

    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_plan --config planned

`planned` changes the recipe that `base` of the JSON file names; `plan(config)` changes any.

Needs torchtitan 0.3; another version is warned of, and tried.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

_TESTED = "0.3."


def planned() -> Any:
    """The ``Trainer.Config`` of the plan.

    Raises
    ------
    ValueError
        The JSON file names no recipe, or it is of another model.
    """
    base = _content()["base"]
    if not base:
        raise ValueError("torchtitan_plan.json: name your recipe in 'base', as \"module:function\"")
    module, _, function = base.partition(":")
    return plan(getattr(importlib.import_module(module), function)())


def plan(config: Any) -> Any:
    """A ``Trainer.Config`` changed in place: degrees, stages, schedule, batch and recomputation are those of the plan.

    Raises
    ------
    ValueError
        Its model has another number of layers, or this version of torchtitan lacks a setting.
    """
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    content = _content()
    if not version("torchtitan").startswith(_TESTED):
        warnings.warn(f"torchtitan {version('torchtitan')}: this plan was tested with {_TESTED}x", stacklevel=2)
    layers = len(config.model_spec.model.layers)
    if layers != content["layers"]:
        raise ValueError(f"the plan is for {content['layers']} layers, and the recipe's model has {layers}")
    config.parallelism = _changed(config.parallelism, content["parallelism"])
    config.training = _changed(config.training, content["training"])
    kinds = {"full": FullAC.Config, "selective": SelectiveAC.Config}
    config.activation_checkpoint = kinds[content["activation_checkpoint"]]() if content["activation_checkpoint"] else None
    return config


def _changed(settings: Any, values: dict[str, Any]) -> Any:
    unknown = sorted({*values} - {field.name for field in dataclasses.fields(settings)})
    if unknown:
        raise ValueError(f"torchtitan {version('torchtitan')} has no {type(settings).__name__}.{unknown[0]}")
    return dataclasses.replace(settings, **values)


def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    if content.get("version") != 1:
        raise ValueError(f"torchtitan_plan.json has version {content.get('version')}, and this file reads version 1")
    return content
