"""``parse_shape(text) -> HloShape``: types and layouts as HLO prints them, ``bf16[128,384]{1,0:T(8,128)(2,1)S(1)}``.

The layout in braces is the order of the dimensions from the fastest varying on, then tiles ``T(...)``, the element's size in bits
``E(...)`` and the memory space ``S(...)``. A tuple is its elements in parentheses, which may be tuples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dpro_search.errors import TraceFormatError

HOST_MEMORY_SPACE = 5  # xla::Layout::kHostMemorySpace

_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_BITS = re.compile(r"[a-z]+(\d+)")  # "bf16", "f8e4m3fn", "s4": the first number is that of bits
_TILES = re.compile(r"T((?:\([^)]*\))+)")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_NO_DATA = ("token", "opaque")


@dataclass(frozen=True)
class HloShape:
    """The type of a value: an array, or a tuple of shapes.

    Dimensions of an array that is dynamic within a bound (``<=8``) have their bound; one without a bound (``?``) is -1, and then
    the bytes are unknown.
    """

    dtype: str  # As HLO names it: "bf16", "f8e4m3fn", "pred", "token"; "tuple" for a tuple.
    dimensions: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()  # Empty where the text has no layout: then the last dimension varies fastest.
    tiles: tuple[tuple[int, ...], ...] = ()  # The first is a tile of the array, each later one a tile of the one before it.
    memory_space: int = 0  # 0 is the device's main memory, 5 the host's; others are the backend's own (TPU: 1 is VMEM).
    element_bits: int = 0  # Size of an element that the layout states, in bits; 0: that of the type, at least one byte.
    elements: tuple[HloShape, ...] = ()  # The elements of a tuple.

    @property
    def is_tuple(self) -> bool:
        return self.dtype == "tuple"

    @property
    def in_host_memory(self) -> bool:
        return self.memory_space == HOST_MEMORY_SPACE

    @property
    def size(self) -> int:
        """Number of the array's elements; of a tuple the sum."""
        return sum(leaf.size for leaf in self.elements) if self.is_tuple else math.prod(self.dimensions)

    @cached_property
    def bytes(self) -> int:
        """Bytes of the elements, without padding; of a tuple the sum.

        Raises `TraceFormatError` where a dimension has no bound, or the type is of no known size.
        """
        if self.is_tuple:
            return sum(leaf.bytes for leaf in self.elements)
        self._require_bound()
        return (self.size * self._bits + 7) // 8

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes that the array takes in memory: each tile is whole (``T(8,128)`` rounds up to multiples of 8 and 128)."""
        if self.is_tuple:
            return sum(leaf.padded_bytes for leaf in self.elements)
        self._require_bound()
        order = self.minor_to_major or tuple(reversed(range(len(self.dimensions))))
        sizes = [self.dimensions[dim] for dim in reversed(order)]  # from the slowest varying to the fastest
        for tile in self.tiles:
            sizes = [1] * (len(tile) - len(sizes)) + sizes
            covered = sizes[len(sizes) - len(tile) :]
            sizes = [*sizes[: len(sizes) - len(tile)], *(-(-size // part) for size, part in zip(covered, tile, strict=True)), *tile]
        return (math.prod(sizes) * self._bits + 7) // 8

    def leaves(self) -> Iterator[HloShape]:
        """The arrays of a tuple of any depth, in order; an array is its own only leaf."""
        if not self.is_tuple:
            yield self
        for element in self.elements:
            yield from element.leaves()

    def __str__(self) -> str:
        if self.is_tuple:
            return f"({', '.join(map(str, self.elements))})"
        return f"{self.dtype}[{','.join(map(str, self.dimensions))}]"

    def _require_bound(self) -> None:
        if -1 in self.dimensions:
            raise TraceFormatError(f"the shape {self} has a dimension without a bound: its size is unknown")

    @property
    def _bits(self) -> int:
        if self.element_bits:
            return self.element_bits
        if self.dtype in _NO_DATA:
            return 0
        if self.dtype == "pred":
            return 8
        match = _BITS.match(self.dtype)
        if match is None:
            raise TraceFormatError(f"the shape {self} has the element type '{self.dtype}' of unknown size")
        return max(8, int(match[1]))


@lru_cache(maxsize=1 << 16)
def parse_shape(text: str) -> HloShape:
    """The shape that a text spells; `TraceFormatError` with the text if it spells none."""
    stripped = _COMMENT.sub("", text).strip()
    shape, end = _shape(stripped, 0)
    if end != len(stripped):
        raise _not_a_shape(text)
    return shape


def _shape(text: str, start: int) -> tuple[HloShape, int]:
    """The shape that begins at a place, and where it ends."""
    if text.startswith("b(", start):  # a buffer, which is updated in place: the array within counts
        shape, end = _shape(text, start + 2)
        if text[end : end + 1] != ")":
            raise _not_a_shape(text)
        return shape, end + 1
    if not text.startswith("(", start):
        match = _ARRAY.match(text, start)
        if match is None:
            raise _not_a_shape(text)
        return _array(match[1], match[2], match[3] or ""), match.end()
    return _tuple(text, start)


def _tuple(text: str, start: int) -> tuple[HloShape, int]:
    elements: list[HloShape] = []
    opened: list[list[HloShape]] = []  # elements of the tuples around the one that is being read
    place = start + 1
    while True:
        while text[place : place + 1] in (",", " ") and place < len(text):
            place += 1
        if text.startswith("(", place):
            opened.append(elements)
            elements, place = [], place + 1
        elif text.startswith(")", place):
            place += 1
            shape = HloShape("tuple", elements=tuple(elements))
            if not opened:
                return shape, place
            elements = opened.pop()
            elements.append(shape)
        else:
            shape, place = _shape(text, place)
            elements.append(shape)


@lru_cache(maxsize=1 << 16)
def _array(dtype: str, dimensions: str, layout: str) -> HloShape:
    order, _, rest = layout.partition(":")
    tiles = _TILES.search(rest)
    space, bits = _MEMORY_SPACE.search(rest), _ELEMENT_BITS.search(rest)
    try:
        sizes = tuple(_dimension(size) for size in dimensions.split(",") if size)
        minor_to_major = tuple(int(dim) for dim in order.split(",") if dim)
        parts = tuple(_tile(tile) for tile in tiles[1][1:-1].split(")(")) if tiles else ()
    except ValueError:
        raise _not_a_shape(f"{dtype}[{dimensions}]{{{layout}}}") from None
    if any(size < 1 for part in parts for size in part):
        raise _not_a_shape(f"{dtype}[{dimensions}]{{{layout}}}")
    if minor_to_major and sorted(minor_to_major) != list(range(len(sizes))):
        raise _not_a_shape(f"{dtype}[{dimensions}]{{{layout}}}")
    return HloShape(dtype, sizes, minor_to_major, parts, int(space[1]) if space else 0, int(bits[1]) if bits else 0)


def _dimension(text: str) -> int:
    return -1 if text.strip() == "?" else int(text.strip().removeprefix("<="))


def _tile(text: str) -> tuple[int, ...]:
    """The sizes of a tile; ``*`` joins a dimension with the next one, which leaves the number of elements as it is."""
    return tuple(int(size) for size in text.split(",") if size not in ("*", ""))


def _not_a_shape(text: str) -> TraceFormatError:
    return TraceFormatError(f"'{text if len(text) <= 80 else text[:77] + '...'}' is not a shape of HLO")
