"""Clusters of TPUs by the names of their topologies: ``tpu_cluster("v5p:4x4x8")``.

==================  =================================================================================
``v6e:16x16``       a slice as JAX and libtpu name it (``jax.experimental.topologies``)
``tpu7x:2x2x2``     likewise; ``v7x`` and ``ironwood`` are the same generation
``v5p-1024``        as Cloud names it: the number counts TensorCores (v4, v5p, TPU7x), here of 512 chips
``v6e-256``         or chips (v5e, v6e)
==================  =================================================================================

``tpus.toml`` has what a generation's chips are joined by, each value with its source.
"""

from __future__ import annotations

import math
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dpro_search.cluster import bundled
from dpro_search.cluster.cluster import Cluster, HostGroup
from dpro_search.cluster.device import Provenance
from dpro_search.cluster.host import Host, Nics
from dpro_search.cluster.link import HOST_SHAPE, Link, Torus
from dpro_search.errors import InputError

HOP_US = 1.0
"""Latency of a link; "How to Scale Your Model" (jax-ml/scaling-book, sharding): "typically around 1us"."""
_CHIPS_PER_HOST = math.prod(HOST_SHAPE)
_WHOLE_AXIS = 16  # v5e, v6e: an axis of a whole pod, the only one that wraps around
_CUBE = 4  # v4, v5p, TPU7x: optical switches close the axes of slices that consist of cubes of 4 x 4 x 4 chips
_TOPOLOGY = re.compile(r"([\w. ()-]+?)\s*[:=]\s*([0-9x]+)(_twisted|_untwisted)?", re.IGNORECASE)
_COUNTED = re.compile(r"([\w. -]+?)-(\d{1,6})")
# Shapes that Cloud gives a number of chips for which no topology is asked (Google Cloud TPU documentation, TPU v5e and TPU v5p).
_SHAPES: dict[int, dict[int, tuple[int, ...]]] = {
    2: {4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)},
    3: {
        **{4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8), 256: (4, 8, 8)},
        **{512: (8, 8, 8), 1024: (8, 8, 16), 2048: (8, 16, 16), 4096: (16, 16, 16), 6144: (16, 16, 24)},
    },
}


class _Sources(msgspec.Struct, frozen=True):
    """Sources of the values of a generation."""

    all: str
    link: str
    dcn: str
    pcie: str


class TpuGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """Links of the chips of one generation of TPUs, among each other and to hosts."""

    names: str  # As libtpu names it, before the colon of a topology.
    cloud: Literal["cores", "chips"]  # Unit of the number in Cloud's names.
    axes: int  # Axes of the torus: two or three.
    most_chips: int  # Chips of a pod: no slice has more.
    link_bytes_per_us: float  # One link in one direction.
    devices_per_chip: int  # Devices that JAX lists for a chip.
    dcn_bps_per_chip: float  # Data centre network, of each chip in one direction, in bits a second.
    pcie_bytes_per_us: float | None = None  # Between a chip and its host, in one direction; None: not known.
    vm_cpu_cores: int | None = None  # Virtual CPUs of a machine with four chips; None: not known.
    vm_memory_bytes: float | None = None
    source: _Sources


def tpu_cluster(name: str, slices: int = 1) -> Cluster | None:
    """The slices that a topology's name stands for; None if the text is no such name.

    Raises
    ------
    InputError
        The generation or the topology does not exist.
    """
    topology = _TOPOLOGY.fullmatch(name.strip())
    if topology is not None:
        return _of_shape(name, topology, slices)
    counted = _COUNTED.fullmatch(name.strip())
    device = None if counted is None else _device_of(counted[1])
    if counted is None or device is None:
        return None
    generation, count = generations()[device], int(counted[2])
    cores = (bundled.device(device).cores or 1) if generation.cloud == "cores" else 1
    shapes = {chips: shape for chips, shape in _SHAPES[generation.axes].items() if chips <= generation.most_chips}
    if count % cores or count // cores not in shapes:
        usual = ", ".join(f"{counted[1]}-{chips * cores}" for chips in shapes)
        raise InputError(
            f"'{name}': no slice has {count} {'TensorCores' if cores > 1 else 'chips'}; use {usual}, "
            f"or a topology like {generation.names}:{'x'.join(map(str, shapes[64]))}"
        )
    return _slices(device, shapes[count // cores], slices)


@cache
def generations() -> dict[str, TpuGeneration]:
    """Generations of TPUs by the name of their device."""
    return msgspec.convert(tomllib.loads((Path(__file__).parent / "tpus.toml").read_text("utf-8")), dict[str, TpuGeneration])


def _device_of(text: str) -> str | None:
    """The device that a generation's name stands for; None if it is no TPU's."""
    device = bundled.aliases("device").get(bundled.plain(text))
    return device if device in generations() else None


def _of_shape(name: str, topology: re.Match[str], slices: int) -> Cluster:
    """Slices of a topology "generation:AxBxC"."""
    device = _device_of(topology[1])
    if device is None:
        known = ", ".join(generation.names for generation in generations().values())
        raise InputError(f"'{name}': no TPU is called '{topology[1]}'; known are {known}")
    generation = generations()[device]
    usual = "x".join(map(str, _SHAPES[generation.axes][64]))
    if topology[3] and topology[3].lower() == "_twisted":
        raise InputError(f"'{name}': twisted tori have no model; leave '_twisted' out, which predicts the plain torus")
    if not re.fullmatch(r"\d{1,4}(x\d{1,4}){1,2}", topology[2]):
        raise InputError(f"'{name}': write the chips along each axis, like {generation.names}:{usual}")
    shape = tuple(map(int, topology[2].split("x")))
    if len(shape) == 2 and generation.axes == 3:
        shape = (*shape, 1)
    if generation.axes == 2 and shape[2:] == (1,):
        shape = shape[:2]
    if len(shape) > generation.axes:
        raise InputError(f"'{name}': {generation.names} has a torus of two axes, like {generation.names}:{usual}")
    if math.prod(shape) > generation.most_chips:
        raise InputError(f"'{name}': a pod of {generation.names} has {generation.most_chips} chips, and no slice has more")
    if shape[0] % HOST_SHAPE[0] or shape[1] % HOST_SHAPE[1] or 0 in shape:
        alone = f"; one chip is written {generation.names}" if math.prod(shape) == 1 else ""
        raise InputError(
            f"'{name}': libtpu knows no such slice: hosts have 2 x 2 chips, so that the first two axes are even{alone}"
        )
    return _slices(device, shape, slices)


def wraps_of(generation: TpuGeneration, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """For each axis of a slice, whether its ends are joined."""
    if generation.axes == 2:
        return tuple(size == _WHOLE_AXIS for size in shape)
    return (all(size % _CUBE == 0 for size in shape),) * len(shape)


def _slices(device: str, shape: tuple[int, ...], slices: int) -> Cluster:
    generation = generations()[device]
    torus = Torus(
        shape=shape,
        wraps=wraps_of(generation, shape),
        slices=slices,
        link_bytes_per_us=generation.link_bytes_per_us,
        hop_us=HOP_US,
        devices_per_chip=generation.devices_per_chip,
    )
    pcie_bps = None if generation.pcie_bytes_per_us is None else generation.pcie_bytes_per_us * 8e6
    host = Host(
        device=bundled.device(device),
        devices=_CHIPS_PER_HOST,
        links=(Link(level="pcie", rate_bps=pcie_bps),),
        nics=Nics(count=1, link=Link(level="nic", rate_bps=generation.dcn_bps_per_chip * _CHIPS_PER_HOST)),
        cpu_cores=generation.vm_cpu_cores,
        memory_bytes=generation.vm_memory_bytes,
    )
    name = f"{generation.names}:{torus.text}"
    return Cluster(
        name=name if slices == 1 else f"{slices} x {name}",
        groups=(HostGroup(count=torus.chips * slices // _CHIPS_PER_HOST, host=host),),
        torus=torus,
        provenance=_provenance(generation),
    )


def _provenance(generation: TpuGeneration) -> Provenance:
    unknown = "estimated: no document states it; 0, so that predictions are lower bounds"
    wrapped = "axes of 16 chips" if generation.axes == 2 else "slices of whole cubes; Cloud may twist some, which is not modelled"
    exceptions = {
        "torus.link_rate": generation.source.link,
        "torus.hop": "estimated: How to Scale Your Model (jax-ml/scaling-book, sharding), 2025: typically around 1 us",
        "torus.wraps": f"How to Scale Your Model (jax-ml/scaling-book, tpus), 2025: {wrapped}",
        "nic.rate": generation.source.dcn,
        "nic.latency": unknown,
        "pcie.rate": generation.source.pcie,
        "pcie.latency": unknown,
    }
    return Provenance(source=generation.source.all, exceptions=tuple(sorted(exceptions.items())))
