"""Changes that bfloat16 autocast would make to the modules of a recorded PyTorch model: ops that compute in it, and casts.

Autocast acts on operators as a script calls them: products read bfloat16, some others float32 (its lists for CPUs,
``aten/src/ATen/autocast_mode.cpp``); what is in neither list computes in the type of what it reads. So types are followed along the
tensors of the execution trace, from a module's float32 inputs on. Times are those of the profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dpro_search.collect.assemble.torch.execution import ExecutionNode, TensorUse
from dpro_search.collect.assemble.torch.host_spans import HostSpans
from dpro_search.collect.modules import LoweredOp, LoweredOps
from dpro_search.collect.recorded_names import AUTOGRAD_FUNCTION
from dpro_search.collect.trace import Ints

_PRODUCT_NAMES = (
    "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu "
    "scaled_dot_product_attention"
)
_FLOAT32_NAMES = (
    "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist "
    "cross_entropy_loss ctc_loss fractional_max_pool2d fractional_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d "
    "huber_loss kl_div l1_loss max_pool3d mse_loss nll_loss nll_loss2d prod reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss stft trace"
)
_NORMALISATION_NAMES = "batch_norm group_norm instance_norm layer_norm"  # parameters stay float32; the result is as the first input
_PRODUCTS, _FLOAT32, _NORMALISATIONS = (
    frozenset(f"aten::{name}" for name in names.split()) for names in (_PRODUCT_NAMES, _FLOAT32_NAMES, _NORMALISATION_NAMES)
)
_ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ModuleRows:
    """Rows of one forward pass of a module, and of its backward functions, in a profile."""

    ops: Ints  # Rows of its outermost operators, in order of time.
    functions: Ints  # Rows of its backward functions, in the order of the forward operators that they belong to.
    op_of: Ints  # Place in `ops` of the operator that each function belongs to.
    # forward_us, backward_us: How long the forward pass lasts, and from the start of the first backward function to the end of the
    # last.
    forward_us: float
    backward_us: float

    def names(self, spans: HostSpans) -> tuple[str, ...]:
        """Durations of the operators, then of the backward functions."""
        rows = np.concatenate((self.ops, self.functions))
        return tuple(spans.names[name].removeprefix(AUTOGRAD_FUNCTION) for name in spans.name[rows])

    def functions_of(self, spans: HostSpans) -> list[tuple[int, str]]:
        """Place in `ops`, and name, of each backward function."""
        return list(zip(self.op_of.tolist(), self.names(spans)[len(self.ops) :], strict=True))


@dataclass
class _Region:
    """The types of tensors within a module under autocast."""

    lowered: set[int] = field(default_factory=set)  # storages in bfloat16
    made: set[int] = field(default_factory=set)  # storages that the forward pass made; others are parameters, cast once
    cached: set[int] = field(default_factory=set)
    casts: list[int] = field(default_factory=list)  # elements of each

    def run(self, node: ExecutionNode) -> bool:
        """Whether an operator computes in bfloat16; notes what is cast before it and the type of what it makes."""
        read = {use.storage: use for use in node.inputs if use.dtype == "float" and use.shape}
        lowers = self._lowers(node, list(read))
        if node.name in _PRODUCTS:
            self._cast(use for storage, use in read.items() if storage not in self.lowered | self.cached)
            self.cached |= read.keys() - self.made
        elif node.name in _FLOAT32:
            self._cast(use for storage, use in read.items() if storage in self.lowered)
        for use in node.writes:
            self.made.add(use.storage)
            (self.lowered.add if lowers and use.dtype == "float" else self.lowered.discard)(use.storage)
        return lowers

    def _lowers(self, node: ExecutionNode, read: Sequence[int]) -> bool:
        if node.name in _PRODUCTS:
            return bool(read)
        if node.name in _FLOAT32 or not read:
            return False
        if node.name in _NORMALISATIONS or node.name.endswith("_"):  # in place: as what it changes
            return read[0] in self.lowered
        return self.lowered.issuperset(read)

    def give_back(self, later: Iterable[ExecutionNode]) -> None:
        """Cast what is read after the module."""
        left = set(self.lowered)
        for node in later:
            self._cast({use.storage: use for use in node.inputs if use.storage in left}.values())
            left.difference_update(use.storage for use in (*node.inputs, *node.writes))

    def _cast(self, uses: Iterable[TensorUse]) -> None:
        self.casts += [use.size_bytes // _ELEMENT_BYTES for use in uses]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """The effect of autocast on a module."""

    # Of its ops, operators before backward functions, [ops + functions]: names, those of convolutions with their kind of filter.
    types: tuple[str, ...]
    lowers: npt.NDArray[np.bool_]  # Which compute in bfloat16, [ops + functions].
    casts: tuple[int, ...]  # Elements of each cast of the forward pass.


def lowering(spans: HostSpans, executed: ModuleRows, nodes: Sequence[ExecutionNode], first: int) -> Lowering | None:
    """Follow the types through a module; None where it computes no product in float32.

    Parameters
    ----------
    executed
        The forward pass that the execution trace has.
    nodes, first
        The outermost operators of that forward pass of the whole model, and the place of the module's first.
    """
    end = first + len(executed.ops)
    region = _Region(made={use.storage for node in nodes[:first] for use in node.writes})
    chosen = np.array([region.run(node) for node in nodes[first:end]], dtype=np.bool_)
    if not any(node.name in _PRODUCTS and lowers for node, lowers in zip(nodes[first:end], chosen, strict=True)):
        return None
    region.give_back(nodes[end:])
    filters = [_filter(node) for node in nodes[first:end]]
    of_op = [*filters, *(filters[op] if "Convolution" in name else "" for op, name in executed.functions_of(spans))]
    return Lowering(
        types=tuple(name + kind for name, kind in zip(executed.names(spans), of_op, strict=True)),
        lowers=np.concatenate((chosen, chosen[executed.op_of])),
        casts=tuple(region.casts),
    )


def _filter(node: ExecutionNode) -> str:
    """Suffix of the type of a convolution: the side of its filter if it is depthwise; empty if it is an ordinary one."""
    shapes = [use.shape for use in node.inputs[:2]]
    if not node.name.startswith("aten::conv") or len(shapes) < 2 or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) < 3:
        return ""
    image, weights = shapes
    if weights[1] < image[1] and "transpose" not in node.name:
        return f" depthwise_{max(weights[2:])}" if weights[1] == 1 else " grouped"
    return " pointwise" if set(weights[2:]) == {1} else ""


def lowered_ops(spans: HostSpans, calls: Sequence[ModuleRows], executed: ModuleRows, lowering: Lowering) -> LoweredOps:
    """Ops of a module that would run in bfloat16, with their times in float32.

    Parameters
    ----------
    calls
        Its forward passes in the profiled steps. `executed` counts only where no other ran the same operators: the observer of the
        execution trace slows them.
    """
    names = executed.names(spans)
    alike = [call for call in calls if call is not executed and call.names(spans) == names] or [executed]
    rows = np.array([np.concatenate((call.ops, call.functions)) for call in alike])
    us = np.median(spans.end_us[rows] - spans.start_us[rows], axis=0)
    of_type: dict[tuple[str, bool], list[float]] = {}
    for place in np.flatnonzero(lowering.lowers).tolist():
        of_type.setdefault((lowering.types[place], place >= len(executed.ops)), []).append(float(us[place]))
    return LoweredOps(
        forward_us=round(float(np.median([call.forward_us for call in alike])), 1),
        backward_us=round(float(np.median([call.backward_us for call in alike])), 1),
        ops=tuple(
            LoweredOp(name, backward, len(times_us), round(sum(times_us), 1)) for (name, backward), times_us in of_type.items()
        ),
        casts=len(lowering.casts),
        cast_elements=sum(lowering.casts),
    )
