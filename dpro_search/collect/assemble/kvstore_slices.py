"""How MXNet's KVStore cuts gradients and which server gets which part: `Slicing`.

By default (``KVStoreDist``), a tensor of fewer elements than MXNET_KVSTORE_BIGARRAY_BOUND goes to one server, which follows from
its key; a larger one is cut into a part for each server. With priority slices (``P3StoreDist``: DMLC_PS_VAN_TYPE=p3; Jayarajan et
al., Priority-based parameter propagation, MLSys 2019), every tensor is cut into parts of MXNET_KVSTORE_SLICE_THRESHOLD elements,
which are distributed over the servers round-robin, in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpro_search.errors import InputError

BOUND, SLICE_THRESHOLD, VAN = "MXNET_KVSTORE_BIGARRAY_BOUND", "MXNET_KVSTORE_SLICE_THRESHOLD", "DMLC_PS_VAN_TYPE"
DEFAULT_KNOBS = {BOUND: "1000000", VAN: "", SLICE_THRESHOLD: "40000"}

_MOST = 10**6  # keys, and slices of a tensor: more are no job but a damaged file
_SPREAD = 9973  # KVStoreDist: key * 9973 % servers


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """The rule under given knobs; `InputError` for a number below 1."""

    servers: int
    bound: int = 1_000_000  # Elements from which on a tensor is cut, without priority slices.
    priority: bool = False  # Whether slices are of `slice_threshold` elements each, and workers update.
    slice_threshold: int = 40_000

    def __post_init__(self) -> None:
        for name in ("servers", "bound", "slice_threshold"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: a job with parameter servers needs at least 1")

    @staticmethod
    def of_knobs(knobs: Mapping[str, str], servers: int) -> Slicing:
        """The rule of a recording; raises `InputError` if a knob is not a number."""
        texts = {name: knobs.get(name) or DEFAULT_KNOBS[name] for name in (BOUND, SLICE_THRESHOLD)}
        for name, text in texts.items():
            if not (text.isascii() and text.isdigit()):
                raise InputError(f"{name}={text}: must be a number >= 1")
        return Slicing(
            servers=servers,
            bound=int(texts[BOUND]),
            priority=knobs.get(VAN) == "p3",
            slice_threshold=int(texts[SLICE_THRESHOLD]),
        )

    def parts(self, keys: Sequence[int], elements: Sequence[int]) -> list[list[tuple[int, int]]]:
        """(server, elements) of each part of each tensor.

        Parameters
        ----------
        keys, elements
            Of each tensor; `InputError` for what no job has. Keys that are missing carry no gradient (running statistics): with
            priority slices, each is taken to be one slice, for it has few elements.
        """
        if any(not 0 <= key < _MOST for key in keys) or any(not 0 < count < _MOST * self.slice_threshold for count in elements):
            raise InputError(f"keys must be between 0 and {_MOST}, and a tensor have elements for less than {_MOST} slices")
        if not self.priority:
            return [self._by_bound(key, count) for key, count in zip(keys, elements, strict=True)]
        size = dict(zip(keys, elements, strict=True))
        turn, parts_of_key = 0, {}
        for key in range(max(size, default=-1) + 1):
            count = size.get(key, 1)
            cuts = [*range(0, count, self.slice_threshold), count]
            parts_of_key[key] = [((turn + i) % self.servers, b - a) for i, (a, b) in enumerate(pairwise(cuts))]
            turn += len(parts_of_key[key])
        return [parts_of_key[key] for key in keys]

    def _by_bound(self, key: int, count: int) -> list[tuple[int, int]]:
        if count < self.bound:
            return [(key * _SPREAD % self.servers, count)]
        cuts = np.round(np.arange(self.servers + 1) * count / self.servers).astype(np.int64)
        return [(server, part) for server, part in enumerate(np.diff(cuts).tolist()) if part]
