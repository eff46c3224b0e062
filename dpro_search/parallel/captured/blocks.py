"""`BlockMaker`: captured ops of a block as ops with named dims, whose sizes follow from batch and sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dpro_search.collect.capture import CapturedOp, CapturedTensor
from dpro_search.collect.capture.graph_file import GROWTH, CapturedParameter, dtype_bytes
from dpro_search.parallel.captured.flow import Flow
from dpro_search.parallel.captured.regions import Regions, is_matmul
from dpro_search.parallel.model import TENSOR_DIM, Block, Op, OpType, Shape

Dims = tuple[str, ...]
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution_backward", "scaled_dot_product")
"""Ops of a backward pass that the cost models derive from the forward pass, by what their names contain."""


@dataclass
class BlockMaker:
    """Makes one block.

    Parameters
    ----------
    batch, sequence
        Sizes at which the step was captured; a model without sequences has one of 1.
    before
        Ops of the block before, whose results are this block's input.
    weights
        Parameters by the op that they belong to.
    """

    flow: Flow
    segment: Sequence[int]
    regions: Regions
    batch: int
    sequence: int
    before: frozenset[int]
    weights: Mapping[int, Sequence[CapturedParameter]]
    sizes: dict[str, float] = field(default_factory=dict)
    causal: bool = False
    tokens: int = -1  # The op that is called "tokens": of an embedding's matrix that the head uses too.
    _outputs: dict[int, Shape] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def block(self, name: str, hidden: float) -> Block:
        """The block; `hidden` elements of its input belong to a token."""
        self.sizes |= {"hidden": hidden, "one": 1.0}
        ops: list[Op] = []
        for place, number in enumerate(self.segment):
            self._names[number] = "tokens" if number == self.tokens else f"{place}:{self.flow.ops[number].name.rpartition(':')[2]}"
            made = list(self._made(number))
            self._outputs[number] = made[0].output
            ops += made
        share = 0.5 if self.causal else 1.0
        return Block(name=name, count=1, ops=tuple(ops), sizes=self.sizes, context_share=share)

    def _made(self, number: int) -> Iterable[Op]:
        op = self.flow.ops[number]
        if is_matmul(op):
            yield self._matmul(number)
        elif op.name == "aten::convolution":
            yield self._convolution(number)
        elif "scaled_dot_product" in op.name:
            yield self._attention(number)
        else:
            yield self._memory_bound(number)
            return
        rest = [each for each in self.flow.backward.get(number, ()) if not any(part in each.name for part in _PRODUCTS)]
        if rest:
            name = f"{self._names[number]}.rest"
            moved = self._moved(name, rest, split=number in self.regions.split)
            yield Op(name=name, type=OpType.POINTWISE, output=(), moved_bytes=((), moved), kernels=(0, len(rest)))

    def _memory_bound(self, number: int) -> Op:
        op, name, split = self.flow.ops[number], self._names[number], number in self.regions.split
        after = self.flow.backward.get(number, ())
        weight = self._weight(number, (), ())
        return Op(
            name=name,
            type=OpType.POINTWISE,
            inputs=self._inputs(number),
            output=self._output(number),
            reads=self._reads(number),
            weight=weight,
            saves_bytes=self._saved(number),
            moved_bytes=(self._moved(name, [op], split=split), self._moved(f"{name}'", after, split=split)),
            kernels=(1, len(after)),
        )

    def _matmul(self, number: int) -> Op:
        op, name = self.flow.ops[number], self._names[number]
        first, second = op.inputs[-2:]
        rows = self._dims(name, "rows", first.shape[:-1], first.grows[:-1], split=self._splits_rows(number))
        columns = self._dims(name, "columns", second.shape[-1:], second.grows[-1:], split=number in self.regions.columns)
        reduction = self._dims(name, "reduction", first.shape[-1:], first.grows[-1:], split=False)
        if number in self.regions.rows:
            reduction = self._split_reduction(number, first.shape[-1]) or reduction
        return self._product(number, OpType.MATMUL, self._reads(number), rows, reduction, columns)

    def _splits_rows(self, number: int) -> bool:
        """Whether ranks have some of many products each, as of attention's heads."""
        return number in self.regions.split and number not in self.regions.columns

    def _split_reduction(self, number: int, size: int) -> tuple[str, ...]:
        """The dims of what a linear layer reads that it sums over; empty: they are not its reduction."""
        for source in self.flow.sources[number]:
            if source in self.regions.split:
                (term,) = self._outputs[source][:1]
                dims = tuple(dim for dim in term if dim not in ("batch", "sequence"))
                if math.isclose(math.prod(self.sizes[dim] for dim in dims), size):
                    return dims
        return ()

    def _convolution(self, number: int) -> Op:
        op, name = self.flow.ops[number], self._names[number]
        weight, output = op.inputs[1], op.outputs[0]
        positions = output.shape[:1] + output.shape[2:]
        rows = self._dims(name, "rows", positions, output.grows[:1] + output.grows[2:], split=False)
        reduction = self._dims(name, "reduction", weight.shape[1:], "", split=False)
        columns = self._dims(name, "columns", output.shape[1:2], "", split=False)
        self.sizes[f"{name}.groups"] = float(op.attributes.get("groups", 1))
        self.sizes[f"{name}.window"], self.sizes[f"{name}.dims"] = float(math.prod(weight.shape[2:])), float(len(weight.shape) - 2)
        reads = (self._term(name, "read", op.inputs[0], split=False),)
        return self._product(number, OpType.CONVOLUTION, reads, rows, reduction, columns)

    def _product(self, number: int, kind: OpType, reads: Shape, rows: Dims, reduction: Dims, columns: Dims) -> Op:
        """A matrix product, or a convolution as one."""
        return Op(
            name=self._names[number],
            type=kind,
            inputs=self._inputs(number),
            output=((*rows, *columns),),
            reads=reads,
            rows=(rows,),
            reduction=(reduction,),
            columns=(columns,),
            weight=self._weight(number, reduction, columns),
            saves_bytes=self._saved(number),
        )

    def _attention(self, number: int) -> Op:
        op, name, split = self.flow.ops[number], self._names[number], number in self.regions.split
        queries, keys, values = op.inputs[:3]
        self.causal = self.causal or bool(op.attributes.get("is_causal"))
        heads = {
            "heads": queries.shape[-3],
            "kv_heads": keys.shape[-3],
            "head_dim": queries.shape[-1],
            "value_dim": values.shape[-1],
        }
        for dim, size in heads.items():
            self.sizes.setdefault(dim, float(size))
        known = all(self.sizes[dim] == size for dim, size in heads.items())
        grows = queries.powers == (1, 1) or (self.sequence == 1 and queries.shape[-2] == 1)
        if known and grows:
            head_dims = ("heads", "head_dim"), ("heads", "value_dim")
            if not split:  # dims of this name would be split
                self.sizes |= {f"{name}.heads": float(heads["heads"])}
                head_dims = (f"{name}.heads", "head_dim"), (f"{name}.heads", "value_dim")
            output: Shape = (("batch", "sequence", *head_dims[1]),)
            flops: Shape = tuple(("batch", "sequence", "context", *each) for each in head_dims)
            factor = 2.0
        else:
            output = (self._term(name, "output", op.outputs[0], split=split),)
            share = 0.5 if op.attributes.get("is_causal") else 1.0
            self.sizes[f"{name}.flops"] = op.flops * share / self.batch
            flops, factor = (("batch", f"{name}.flops"),), 1.0
        return Op(
            name=name,
            type=OpType.ATTENTION,
            inputs=self._inputs(number),
            output=output,
            reads=self._reads_of_attention(number),
            saves_bytes=self._saved(number),
            flops=flops,
            flops_factor=factor,
        )

    def _reads_of_attention(self, number: int) -> Shape:
        """Queries, keys, values; where one op makes all of them, its result in three parts."""
        reads = self._reads(number)
        if len(reads) == 1:
            self.sizes["third"] = 1 / 3
            return ((*reads[0], "third"),) * 3
        return reads

    # Dims.

    def _output(self, number: int) -> Shape:
        op, name, split = self.flow.ops[number], self._names[number], number in self.regions.split
        return tuple(self._term(name, f"output{place}", tensor, split=split) for place, tensor in enumerate(op.outputs[:1]))

    def _reads(self, number: int) -> Shape:
        shape: list[tuple[str, ...]] = []
        for source in self._sources(number):
            shape += self._outputs.get(source, (("batch", "sequence", "hidden"),) if self._is_stream(source) else ())
        return tuple(shape)

    def _sources(self, number: int) -> list[int]:
        """Ops whose results an op reads, without casts of parameters: every rank makes those that it needs."""
        return [source for source in self.flow.sources[number] if not self.flow.is_of_parameters(self.flow.ops[source])]

    def _is_stream(self, source: int) -> bool:
        """Whether an op of the block before made something for each sample."""
        return source in self.before and any(tensor.powers[0] or not tensor.grows for tensor in self.flow.ops[source].outputs[:1])

    def _inputs(self, number: int) -> tuple[str, ...]:
        """Ops of this block, or "" for the block before; what older blocks made, such as masks, every rank has."""
        names = [
            self._names[source] if source in self._names else "" if self._is_stream(source) else None
            for source in self._sources(number)
        ]
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def _term(self, name: str, what: str, tensor: CapturedTensor, *, split: bool) -> tuple[str, ...]:
        return self._dims(name, what, tensor.shape, tensor.grows, split=split)

    def _dims(self, name: str, what: str, shape: Sequence[int], grows: str, *, split: bool) -> tuple[str, ...]:
        """Dims of a tensor: batch and sequence as often as it grows with them, and one of all the rest, where there is any."""
        powers = [GROWTH[letter] for letter in grows]
        rest = float(math.prod(shape))
        return self._grown(
            (sum(batch for batch, _ in powers), sum(sequence for _, sequence in powers)), rest, name, what, split=split
        )

    def _grown(self, powers: tuple[int, int], size: float, name: str, what: str, *, split: bool) -> tuple[str, ...]:
        batch, sequence = powers
        rest = size / (self.batch**batch * self.sequence**sequence)
        dims = ("batch",) * batch + ("sequence",) * min(sequence, 1) + ("keys",) * max(sequence - 1, 0)
        if rest == 1.0 and not split and dims:
            return dims
        new_dim = f"{TENSOR_DIM}:{name}.{what}" if split else f"{name}.{what}"
        self.sizes[new_dim] = rest
        return (*dims, new_dim)

    # Bytes.

    def _moved(self, name: str, ops: Iterable[CapturedOp], *, split: bool) -> Shape:
        """Bytes that ops read and write, by how they grow."""
        totals: dict[tuple[int, int], float] = {}
        ops = tuple(ops)
        grows = any(tensor.powers[0] for op in ops for tensor in (*op.inputs, *op.outputs))  # else it casts a weight
        for op in ops:
            for tensors, counted in ((op.inputs, op.read_bytes), (op.outputs, op.written_bytes)):
                if op.name == "aten::embedding" and tensors is op.inputs:  # some rows of the table
                    tensors, counted = op.outputs, op.written_bytes
                sizes = [tensor.elements * dtype_bytes(tensor.dtype) for tensor in tensors]
                factor = min(counted / sum(sizes), 1.0) if sum(sizes) else 0.0  # less of what is expanded
                for tensor, size in zip(tensors, sizes, strict=True):
                    totals[tensor.powers] = totals.get(tensor.powers, 0.0) + size * factor
        return tuple(
            self._grown(powers, size, name, f"moved{place}", split=split and (powers[0] > 0 or not grows))
            for place, (powers, size) in enumerate(sorted(totals.items()))
            if size
        )

    def _saved(self, number: int) -> Shape:
        split, name = number in self.regions.split, self._names[number]
        return tuple(
            self._grown(saved.grows, saved.size_bytes, name, f"saved{place}", split=split)
            for place, saved in enumerate(self.flow.saved.get(number, ()))
        )

    def _weight(self, number: int, reduction: tuple[str, ...], columns: tuple[str, ...]) -> Shape:
        """Parameters that belong to an op: a matrix and a bias, or others."""
        shape: list[tuple[str, ...]] = []
        name = self._names[number]
        wide = math.prod(self.sizes[dim] for dim in columns) if columns and "batch" not in columns else 0.0
        tall = math.prod(self.sizes[dim] for dim in reduction) if reduction and "batch" not in reduction else 0.0
        for place, parameter in enumerate(self.weights.get(number, ())):
            if wide and parameter.elements == wide * tall:
                shape.append((*reduction, *columns))
            elif wide and parameter.elements == wide:
                shape.append(columns)
            else:
                split = number in self.regions.split and not columns
                shape.append(self._grown((0, 0), parameter.elements, name, f"weight{place}", split=split))
        return tuple(shape)
