"""`compile_block`: what a rank computes and exchanges in the forward and backward pass of a block, under a layout.

An op needs its inputs in the layout of its own dims. Where a tensor has another layout, or is a sum of parts, `conversions` names
the collectives. The gradient of an input is a sum of parts over the axes that split dims which the input does not have (the columns
of a matmul), and goes back to the layout that the tensor was made in: so the backward pass of an all-gather is a reduce-scatter,
that of a free slice an all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dpro_search.collect.trace import CollectiveKind
from dpro_search.parallel.layout import Splits, TensorLayout, axes_of, conversions, restricted
from dpro_search.parallel.model import Block, Op, OpType, Shape, elements
from dpro_search.parallel.model.op import dims_of

CONTEXT = "cp"  # the axis that splits sequences in attention, too
EXPERTS, EXPERT_WIDTH = "ep", "etp"


class LocalOp(NamedTuple):
    """An op as one rank carries it out."""

    op: Op
    sizes: Mapping[str, float]  # Of its dims on the rank.
    # What goes round a ring of ranks beside it: the op has as many parts as the ring has ranks, and each waits for what arrives.
    beside: tuple[BlockCollective, ...] = ()


class BlockCollective(NamedTuple):
    """An exchange between the ranks along an axis. If the type is SEND, each rank sends to the next one of a ring."""

    type: CollectiveKind
    axis: str  # Of the strategy's groups.
    elements: float  # Of the whole tensor of all ranks (all-gather, reduce-scatter), or of each rank's (all others).
    tensor: str  # Name of the op that made it.
    gradient: bool  # Whether it is the tensor's gradient.
    repeats: int = 1
    copies: int = 0  # Of an all-to-all of tokens, the experts that each goes to.


class Weight(NamedTuple):
    """Parameters of an op on one rank."""

    op: str
    tensors: tuple[float, ...]  # Elements of each: weight, or weights side by side, and bias.
    shared: frozenset[str]  # Axes beside data parallel ones over which its gradient is a sum of parts.
    expert: bool
    sparse: bool = False  # It has no gradient of its size: a table of which each step updates some rows, or not trained at all.
    fixed: bool = False  # It is not trained, though gradients pass through its op.

    @property
    def elements(self) -> float:
        """Elements of all its tensors."""
        return sum(self.tensors)

    @property
    def trained(self) -> bool:
        """Whether it has a gradient of its size, and an optimizer's state."""
        return not self.sparse and not self.fixed


@dataclass(frozen=True, kw_only=True)
class BlockProgram:
    """One rank's work in a block, once forward and once backward."""

    forward: tuple[LocalOp | BlockCollective, ...]
    backward: tuple[LocalOp | BlockCollective, ...]  # Each op once, though a matmul computes two gradients.
    weights: tuple[Weight, ...]
    saved: Mapping[
        str, float
    ]  # Elements that the backward pass needs, by the name of the op that made them; "" is the block's input.
    saved_bytes: float  # What it needs beside them.
    input_elements: float  # Of the block's input on one rank.


def kept_of_matmuls(program: BlockProgram) -> dict[str, tuple[float, ...]]:
    """For each matmul, by its name, the shares of its columns whose output is kept where every second matmul is computed again.

    Matmuls side by side count one by one (queries, keys, values; gate and value), from the first one on. Of routers and of experts,
    whose grouped products the policy does not know, nothing is kept.
    """
    kept, number = dict[str, tuple[float, ...]](), 0
    for step in program.forward:
        if not isinstance(step, LocalOp) or step.op.type is not OpType.MATMUL:
            continue
        if step.op.dims & {"experts", "choices"}:
            kept[step.op.name] = (0.0,)
            continue
        widths = [elements((term,), step.sizes) for term in step.op.columns]
        kept_widths = [width * (1 - (number + place) % 2) for place, width in enumerate(widths)]
        kept[step.op.name] = tuple(width / sum(widths) for width in kept_widths)
        number += len(widths)
    return kept


def compile_block(block: Block, layout: TensorLayout, batch: int, sequence: int) -> BlockProgram:
    """The program of each rank; all ranks of a block do the same."""
    return _Compiler(block, layout, batch, sequence).program()


class _Compiler:
    def __init__(self, block: Block, layout: TensorLayout, batch: int, sequence: int) -> None:
        self._block, self._layout = block, layout
        self._sizes = block.sizes_at(batch, sequence)
        if "capacity" in self._sizes:
            self._sizes["capacity"] *= layout.expert_load
        self._ops = {op.name: op for op in block.ops}
        self._splits = {op.name: layout.of(op) for op in block.ops}
        stream = ((layout.stream_axis, "sequence"),) if layout.stream_axis and layout.axes[layout.stream_axis] > 1 else ()
        context = tuple((axis, "sequence") for axis in layout.splits.get("sequence", ()) if layout.axes[axis] > 1)
        self._input: Splits = tuple(sorted((*stream, *context)))

    def program(self) -> BlockProgram:
        return BlockProgram(
            forward=tuple(self._forward()),
            backward=tuple(self._backward()),
            weights=tuple(self._weights()),
            saved=self._saved(),
            saved_bytes=sum(elements(op.saves_bytes, self._local(op)) for op in self._block.ops),
            input_elements=self._elements(""),
        )

    def _forward(self) -> Iterator[LocalOp | BlockCollective]:
        whole: set[tuple[str, Splits]] = set()  # tensors that were brought into a layout already
        for op in self._block.ops:
            if op.type is OpType.COMBINE:
                yield from self._sent(op.inputs[0], gradient=False, back=True)
            else:
                for name in op.inputs:
                    need = restricted(self._splits[op.name], self._shape(name))
                    if (name, need) not in whole:
                        whole.add((name, need))
                        yield from self._converted(name, self._made(name), self._partial(name), need, gradient=False)
            yield from self._context(op, gradient=False)
            yield self._op(op, gradient=False)
            if op.type is OpType.DISPATCH:
                yield from self._sent(op.name, gradient=False, back=False)
        last = self._block.ops[-1]
        if last.type is OpType.LOSS:
            yield from self._loss(last)
        else:
            yield from self._converted(last.name, self._made(last.name), self._partial(last.name), self._input, gradient=False)

    def _backward(self) -> Iterator[LocalOp | BlockCollective]:
        for op in reversed(self._block.ops):
            if op.type is OpType.DISPATCH:
                yield from self._sent(op.name, gradient=True, back=True)
            if op is self._block.ops[-1] and op.type is not OpType.LOSS:
                yield from self._converted(op.name, self._input, frozenset(), self._made(op.name), gradient=True)
            yield from self._gathered_again(op)
            yield from self._context(op, gradient=False, again=True)
            yield self._op(op, gradient=True)
            yield from self._context(op, gradient=True)
            if op.type is OpType.COMBINE:
                yield from self._sent(op.inputs[0], gradient=True, back=False)
                continue
            if op.type is OpType.DISPATCH:
                continue
            partial = axes_of(self._splits[op.name], op.partial_gradient_dims)
            for name in op.inputs:
                have = restricted(self._splits[op.name], self._shape(name))
                yield from self._converted(name, have, partial, self._made(name), gradient=True)

    def _gathered_again(self, op: Op) -> Iterator[BlockCollective]:
        """A saved input that every rank keeps a part of, and that the gradient of the weight needs whole."""
        if op.type is OpType.MATMUL and self._layout.regather_inputs:
            for name in op.saves:
                if name in op.inputs:
                    need = restricted(self._splits[op.name], self._shape(name))
                    conversions = self._converted(name, self._made(name), frozenset(), need, gradient=False)
                    yield from (collective for collective in conversions if collective.type is CollectiveKind.ALL_GATHER)

    def _loss(self, op: Op) -> Iterator[BlockCollective]:
        """Exchanges of a loss with a vocabulary split over ranks: the maximum, the sum of exponentials, the target's logit."""
        for axis in sorted(self._partial(op.name)):
            yield BlockCollective(CollectiveKind.ALL_REDUCE, axis, elements(op.output, self._local(op)), op.name, False, 3)

    def _converted(
        self, name: str, have: Splits, partial: frozenset[str], need: Splits, *, gradient: bool
    ) -> Iterator[BlockCollective]:
        """Collectives that bring a tensor from one layout to another."""
        for kind, axis in conversions(have, partial, need):
            if axis in (EXPERTS, EXPERT_WIDTH):
                continue  # tokens travel as `_sent` says
            size = elements(self._shape(name), self._layout.local(self._sizes, tuple(pair for pair in have if pair[0] != axis)))
            if kind is CollectiveKind.ALL_TO_ALL:
                size /= self._layout.axes[axis]
            yield BlockCollective(kind, axis, size, name, gradient)

    def _sent(self, name: str, *, gradient: bool, back: bool) -> Iterator[BlockCollective]:
        """Tokens on their way to the experts, or back: exchanged over the experts' axis, gathered over that of their widths."""
        size = elements(self._shape(name), self._local(self._ops["dispatch"]))
        width = self._layout.axes.get(EXPERT_WIDTH, 1)
        copies = self._block.top_k
        exchange = [BlockCollective(CollectiveKind.ALL_TO_ALL, EXPERTS, size / width, name, gradient, copies=copies)]
        joined = [
            BlockCollective(
                CollectiveKind.REDUCE_SCATTER if back else CollectiveKind.ALL_GATHER, EXPERT_WIDTH, size, name, gradient
            )
        ]
        for collective in (*joined, *exchange) if back else (*exchange, *joined):
            if self._layout.axes.get(collective.axis, 1) > 1:
                yield collective

    def _op(self, op: Op, *, gradient: bool) -> LocalOp:
        """An op, with the ring of keys and values where one exists: one hop less than ranks, and for their gradients as many."""
        ways = self._layout.axes.get(CONTEXT, 1)
        beside: tuple[BlockCollective, ...] = ()
        if op.type is OpType.ATTENTION and self._layout.ring and ways > 1:
            size, name = self._keys_values(op) / ways, op.inputs[0]
            beside = (BlockCollective(CollectiveKind.SEND, CONTEXT, size, name, False, ways - 1),)
            if gradient:
                beside += (BlockCollective(CollectiveKind.SEND, CONTEXT, size, name, True, ways),)
        return LocalOp(op, self._local(op), beside)

    def _context(self, op: Op, *, gradient: bool, again: bool = False) -> Iterator[BlockCollective]:
        """Keys and values of the whole sequence for the queries of a part; their gradients, summed where they came from."""
        ways = self._layout.axes.get(CONTEXT, 1)
        if op.type is OpType.ATTENTION and ways > 1 and not self._layout.ring and (not again or self._layout.regather_inputs):
            kind = CollectiveKind.REDUCE_SCATTER if gradient else CollectiveKind.ALL_GATHER
            yield BlockCollective(kind, CONTEXT, self._keys_values(op), op.inputs[0], gradient)

    def _keys_values(self, op: Op) -> float:
        """Elements of the keys and values of all ranks of a context parallel group."""
        terms = tuple(term for term in op.reads if "kv_heads" in term) or op.reads[1:]
        rest = tuple(pair for pair in self._splits[op.name] if pair[0] != CONTEXT)
        return elements(terms, self._layout.local(self._sizes, rest))

    def _weights(self) -> Iterator[Weight]:
        for op in self._block.ops:
            if op.weight:
                splits = self._splits[op.name]
                shared = axes_of(splits, op.dims - dims_of(op.weight) - {"experts", "capacity"}) - {EXPERTS, EXPERT_WIDTH}
                sizes = self._layout.local(self._sizes, restricted(splits, op.weight))
                tensors = tuple(elements((term,), sizes) for term in op.weight)
                expert = "experts" in dims_of(op.weight) and "capacity" in op.dims
                yield Weight(op.name, tensors, shared, expert, op.sparse or op.frozen, op.fixed)

    def _shape(self, name: str) -> Shape:
        return self._ops[name].output if name else (("batch", "sequence", "hidden"),)

    def _made(self, name: str) -> Splits:
        """The layout in which a tensor is made."""
        return restricted(self._splits[name], self._ops[name].output) if name else self._input

    def _partial(self, name: str) -> frozenset[str]:
        """The axes over which a tensor is made as a sum of parts."""
        return axes_of(self._splits[name], self._ops[name].partial_dims) if name else frozenset()

    def _local(self, op: Op) -> dict[str, float]:
        local_sizes = self._layout.local(self._sizes, self._splits[op.name])
        ways = self._layout.axes.get(CONTEXT, 1)
        if op.type is OpType.ATTENTION and not self._layout.balanced and self._block.context_share < 1:
            # of n x n / 2 products the last of p ranks has n / p rows of n - n / (2 p) on average
            local_sizes["context"] *= (2 * ways - 1) / ways
        return local_sizes

    def _saved(self) -> dict[str, float]:
        saved: dict[str, float] = {}
        for op in self._block.ops:
            for name in op.saves:
                saved[name] = max(saved.get(name, 0.0), self._kept(op, name))
        return saved

    def _kept(self, op: Op, name: str) -> float:
        """Elements of a tensor that an op's backward pass needs: a part, or the whole that was gathered for it."""
        if op.type is OpType.MATMUL and name in op.inputs and not self._layout.regather_inputs:
            need = restricted(self._splits[op.name], self._shape(name))
            return elements(self._shape(name), self._layout.local(self._sizes, need))
        return self._elements(name)

    def _elements(self, name: str) -> float:
        """Elements of a tensor on one rank, in the layout in which it was made, or split further to be summed."""
        splits = self._made(name)
        if self._partial(name):
            splits = tuple(sorted({*splits, *(pair for pair in self._input if pair[0] in self._partial(name))}))
        return elements(self._shape(name), self._layout.local(self._sizes, splits))
