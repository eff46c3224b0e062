"""Target `jax`: a plan's mesh as code for the script, and as overrides of MaxText where its axes have MaxText's names."""

from __future__ import annotations

from dpro_search.deploy.parts.part import JobFacts, Part, Target
from dpro_search.kinds.xla.capture import parse_mesh
from dpro_search.kinds.xla.meshes import MeshSettings
from dpro_search.space.plan import Plan

# Axes of MaxText's meshes (src/maxtext/configs/base.yml: ici_AXIS_parallelism).
MAXTEXT_AXES = (
    *("data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "context_autoregressive", "tensor", "tensor_transpose"),
    *("tensor_sequence", "expert", "autoregressive"),
)
_HELPER = '''"""The mesh of a plan. Written by dpro-search export."""

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

AXES = {axes!r}


def planned_mesh(devices=None):
    """The mesh over all devices, laid out as the program was that the plan's prediction rests on."""
    devices = jax.devices() if devices is None else devices
    placed = mesh_utils.create_device_mesh(tuple(AXES.values()), devices=devices, allow_split_physical_axes=True)
    return Mesh(placed, tuple(AXES))
'''


def mesh_part(plan: Plan, facts: JobFacts) -> Part:
    """A function that makes the mesh; shardings stay as the script has them, by the names of axes."""
    text = MeshSettings.of(plan).mesh
    if text is None:
        return Part()
    axes = parse_mesh(text)
    files = {"planned_mesh.py": _HELPER.format(axes=axes).encode()}
    setup: tuple[str, ...] = ()
    if all(axis in MAXTEXT_AXES for axis in axes):
        files["maxtext.txt"] = (" ".join(f"ici_{axis}_parallelism={size}" for axis, size in axes.items()) + "\n").encode()
        setup = ("With MaxText, `maxtext.txt` has the overrides of its command line instead.",)
    return Part(
        files=files,
        script=("`from planned_mesh import planned_mesh`, and `mesh = planned_mesh()` where the script makes its mesh.",),
        setup=setup,
    )


TARGET = Target(name="jax", fields=("mesh",), part=mesh_part, framework="jax")
