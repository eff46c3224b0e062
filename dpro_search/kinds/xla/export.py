"""Target `jax`: a plan's mesh and choices as code for the script, as compiler flags, and as settings of MaxText."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.deploy.parts.part import JobFacts, Part, Target
from dpro_search.kinds.xla.capture import parse_chosen, parse_mesh
from dpro_search.kinds.xla.plans import XlaSettings
from dpro_search.space.plan import Plan

# Axes of MaxText's meshes (src/maxtext/configs/base.yml: ici_AXIS_parallelism), and settings there that a choice may be called.
MAXTEXT_AXES = (
    *("data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "context_autoregressive", "tensor", "tensor_transpose"),
    *("tensor_sequence", "expert", "autoregressive"),
)
MAXTEXT_SETTINGS = ("remat_policy", "gradient_accumulation_steps")
_MESH = '''"""The mesh and choices of a plan. Written by dpro-search export."""

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, PartitionSpec

AXES = {axes!r}


def planned_mesh(devices=None):
    """The mesh over all devices, laid out as the program was that the plan's prediction rests on."""
    devices = jax.devices() if devices is None else devices
    placed = mesh_utils.create_device_mesh(tuple(AXES.values()), devices=devices, allow_split_physical_axes=True)
    return Mesh(placed, tuple(AXES))
'''
_ARGUMENTS = """
# Keyword arguments of the script's function; its CHOICES calls the values {texts}.
ARGUMENTS = {arguments}
"""
_OPTIONS = """
# For jax.jit(..., compiler_options=COMPILER_OPTIONS); jax.env has the same for the whole process.
COMPILER_OPTIONS = {options!r}
"""
_RULES = '''

def {name}_spec(*logical_axes):
    """The `PartitionSpec` of an array whose dimensions have these logical axes (None: not sharded), by the plan's {name}."""
    return PartitionSpec(*(None if axis is None else ARGUMENTS[{name!r}][axis] for axis in logical_axes))
'''


def program_part(plan: Plan, facts: JobFacts) -> Part:
    """The files of a plan: a module with the mesh, arguments and specs, variables with flags, and MaxText's settings."""
    settings, compiled = XlaSettings.of(plan), facts.compiled
    if settings.mesh is None and settings.choices is None:
        return Part()
    axes = dict(compiled.mesh) if settings.mesh is None else parse_mesh(settings.mesh)
    texts = dict(compiled.chosen) | parse_chosen(settings.choices or "")
    values = {name: compiled.declared.get(name, {}).get(text) for name, text in texts.items()}
    options = values.pop("flags", None) or {}
    arguments = {name: value for name, value in values.items() if value is not None}
    rules = [name for name, value in arguments.items() if _is_rules(value, axes)]

    code = _MESH.format(axes=axes)
    script = ["`from planned_mesh import planned_mesh`, and `mesh = planned_mesh()` where the script makes its mesh."]
    setup = [
        f"Give `CHOICES[{name!r}][{texts[name]!r}]` of the script as {name} too: JSON does not have this value."
        for name in values
        if name not in arguments
    ]
    if arguments:
        named = ", ".join(f"{name}={texts[name]}" for name in arguments)
        code += _ARGUMENTS.format(texts=named, arguments=_code(arguments))
        script.append("`from planned_mesh import ARGUMENTS`, and `**ARGUMENTS` behind the mesh where the script makes its step.")
    if options:
        code += _OPTIONS.format(options=options)
        setup.append("`jax.env` sets the compiler's flags; `COMPILER_OPTIONS` in `planned_mesh.py` are the same for one `jax.jit`.")
    for name in rules:
        code += _RULES.format(name=name)
        setup.append(f"`planned_mesh.{name}_spec` gives the `PartitionSpec` of an array by the names of its logical axes.")
    files = {"planned_mesh.py": code.encode()}
    if all(axis in MAXTEXT_AXES for axis in axes):
        name, content = _maxtext(axes, arguments, rules)
        files[name] = content
        setup.append(f"With MaxText, `{name}` has the mesh, and the choices that MaxText knows, as its own settings.")
    return Part(env=_environment(options, compiled.platform), files=files, script=tuple(script), setup=tuple(setup))


def _is_rules(value: object, axes: Mapping[str, int]) -> bool:
    """Whether a value maps logical axes to axes of the mesh: to one, several, or None."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(axis, str) and axis in axes for mesh_axes in value.values() for axis in _as_list(mesh_axes))


def _code(value: object) -> str:
    """A value as Python has it; lists, which JSON made of tuples, are tuples again, as `PartitionSpec` takes several axes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_code(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "(" + "".join(f"{_code(each)}, " for each in value).rstrip() + ")"
    return repr(value)


def _environment(options: Mapping[str, object], platform: str) -> dict[str, str]:
    """Variables with compiler options: libtpu reads its own, and aborts for none; XLA aborts for a TPU's in ``XLA_FLAGS``."""
    text = " ".join(f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items())
    return {"LIBTPU_INIT_ARGS" if platform == "tpu" else "XLA_FLAGS": text} if text else {}


def _maxtext(axes: Mapping[str, int], arguments: Mapping[str, Any], rules: Sequence[str]) -> tuple[str, bytes]:
    """The name and content of a file with MaxText's settings.

    It is a line for the command line; with sharding rules, which that cannot hold, a file of settings.
    """
    settings: dict[str, object] = {f"ici_{axis}_parallelism": size for axis, size in axes.items()}
    settings |= {name: arguments[name] for name in MAXTEXT_SETTINGS if name in arguments}
    if not rules:
        return "maxtext.txt", (" ".join(f"{name}={value}" for name, value in settings.items()) + "\n").encode()
    settings["logical_axis_rules"] = [[axis, _as_list(mesh_axes)] for axis, mesh_axes in arguments[rules[0]].items()]
    lines = ["base_config: base.yml", *(f"{name}: {json.dumps(value)}" for name, value in settings.items())]
    return "maxtext.yml", ("\n".join(lines) + "\n").encode()


def _as_list(axes: Any) -> list[Any]:  # Any: a value of a script's dictionary, which may be no axes at all
    return [] if axes is None else list(axes) if isinstance(axes, list | tuple) else [axes]


TARGET = Target(name="jax", fields=("mesh", "choices"), part=program_part, framework="jax")
