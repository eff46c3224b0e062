"""`Torus`: chips that links join to their neighbours along two or three axes, and slices of them that hosts' NICs join.

Each chip has a link to the next and one to the previous chip of each axis. Where an axis does not wrap around, the chips at its
ends have one link less, and the axis is a line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from dpro_search.errors import InputError

HOST_SHAPE = (2, 2, 1)
"""Chips of one host along each axis, as libtpu and Cloud's machines with four chips have them."""

Coordinates = tuple[int, int, int]


class Torus(msgspec.Struct, frozen=True, kw_only=True):
    """The shape and the links of slices of TPUs.

    Attributes
    ----------
    shape
        Chips of a slice along each axis, two or three numbers.
    wraps
        For each axis, whether its last chip has a link to its first.
    slices
        Number of equal slices; only their hosts' NICs join them.
    link_bytes_per_us
        Bytes a us that one link carries in one direction, while it carries as much in the other.
    hop_us
        Latency of one link.
    devices_per_chip
        Devices that JAX lists for a chip: its cores where each is a device of its own, else 1.

    Raises
    ------
    InputError
        A number is impossible, or hosts of `HOST_SHAPE` do not fill the slice.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    slices: int = 1
    link_bytes_per_us: float
    hop_us: float
    devices_per_chip: int = 1

    def __post_init__(self) -> None:
        if not 2 <= len(self.shape) <= 3 or any(size < 1 for size in self.shape):
            raise InputError(f"torus.shape must be two or three numbers of chips, not {list(self.shape)}")
        if len(self.wraps) != len(self.shape):
            raise InputError(f"torus.wraps must say true or false for each of {len(self.shape)} axes")
        if any(size % chips for size, chips in zip(self.shape, HOST_SHAPE, strict=False)):
            raise InputError(f"torus.shape {self.text}: hosts have 2 x 2 chips, so that the first two axes must be even")
        if min(self.slices, self.devices_per_chip) < 1:
            raise InputError("torus.slices and torus.devices_per_chip must be at least 1")
        if not 0 < self.link_bytes_per_us < math.inf or not 0 <= self.hop_us < math.inf:
            raise InputError("torus.link_rate must be above 0, and torus.hop at least 0, both finite")

    @property
    def text(self) -> str:
        """The shape as people write it: "4x4x8"."""
        return "x".join(map(str, self.shape))

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Chips along three axes, 1 along a third that the slice does not have."""
        first, second, *third = self.shape
        return (first, second, third[0] if third else 1)

    @property
    def closed(self) -> tuple[bool, bool, bool]:
        """For each of three axes whether it wraps around."""
        first, second, *third = self.wraps
        return (first, second, bool(third and third[0]))

    def coordinates(self) -> tuple[Coordinates, ...]:
        """The place of each chip of a slice in the order in which libtpu lists them: host by host, the first axis fastest."""
        return tuple(self._listed())

    def _listed(self) -> Iterator[Coordinates]:
        hosts = [range(0, size, chips) for size, chips in zip(self.sizes, HOST_SHAPE, strict=True)]
        for z, y, x in itertools.product(*reversed(hosts)):
            for dz, dy, dx in itertools.product(*(range(chips) for chips in reversed(HOST_SHAPE))):
                yield (x + dx, y + dy, z + dz)
