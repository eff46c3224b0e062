"""`Network`: a model that is no transformer, as blocks of ops; `NetworkBuilder` makes one layer by layer from tensors' extents.

A convolution is an implicit matrix product: rows are the output's positions, the reduction is the window times the input's
channels, columns are the output's channels. It reads its input once, not once for each position of the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpro_search.errors import InputError
from dpro_search.parallel.model.block import Block
from dpro_search.parallel.model.op import Op, OpRole, OpType, Shape

WINOGRAD = 1 / 2.25
"""Share of the multiply-adds of a 3 x 3 convolution that F(2 x 2, 3 x 3) needs: 16 of 36 (Lavin and Gray 2016)."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Blocks that run one after the other on a batch of samples; it is split over data parallel ranks only.

    Attributes
    ----------
    blocks
        At least two. A block's input has "hidden" elements a sample; a sample's sequence has length 1.
    """

    name: str
    blocks: tuple[Block, ...]
    dropout: float = 0.0
    tied: bool = False
    hidden: int = 0  # Elements that pipeline stages send; networks are not split into stages.

    def __post_init__(self) -> None:
        if len(self.blocks) < 2:
            raise InputError(f"{self.name}: a network needs two blocks at least")

    @property
    def tables(self) -> int:
        """Embedding tables, which ranks may share (hybrid parallel)."""
        return round(max(block.sizes.get("experts", 0) for block in self.blocks))


@dataclass(frozen=True)
class Tensor:
    """The output of an op: channels and extents (height and width, or depth too) of a sample."""

    op: str
    channels: int
    extent: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """Elements of one channel."""
        return math.prod(self.extent)


@dataclass
class NetworkBuilder:
    """Adds ops to the block that is open.

    `norm_weight` False: norms are constant factors (frozen batch norm), of which the backward pass needs no inputs. While `frozen`
    is set, ops have no backward pass. `instances`: norms are of each image alone, or of volumes.
    """

    name: str
    norm_weight: bool = True
    frozen: bool = False
    instances: bool = False
    _blocks: list[Block] = field(default_factory=list)
    _ops: list[Op] = field(default_factory=list)
    _sizes: dict[str, float] = field(default_factory=dict)
    _block: str = ""
    _made: set[str] = field(default_factory=set)

    def open(self, block: str, source: Tensor) -> Tensor:
        """Start a block that reads a tensor."""
        self._close()
        self._block, self._made = block, {""}
        self._sizes = {"hidden": source.channels * source.positions, "one": 1}
        return Tensor("", source.channels, source.extent)

    def network(self) -> Network:
        """The network of all blocks so far."""
        self._close()
        return Network(name=self.name, blocks=tuple(self._blocks))

    def _close(self) -> None:
        if self._ops:
            tables = round(self._sizes.get("experts", 0))  # each sample reads all of them
            self._blocks.append(Block(name=self._block, count=1, ops=tuple(self._ops), sizes=dict(self._sizes), top_k=tables))
        self._ops = []

    def conv(
        self,
        source: Tensor,
        channels: int,
        window: int | tuple[int, ...] = 3,
        *,
        stride: int = 1,
        padding: int | tuple[int, ...] | None = None,
        groups: int = 1,
        bias: bool = False,
        shared: bool = False,
    ) -> Tensor:
        """A convolution; padding None: as much as keeps the extent at stride 1. `shared`: its weight is that of an op before it."""
        windows = (window,) * len(source.extent) if isinstance(window, int) else window
        paddings = tuple(size // 2 for size in windows) if padding is None else _each(padding, len(windows))
        extent = tuple(
            (size + 2 * pad - width) // stride + 1 for size, width, pad in zip(source.extent, windows, paddings, strict=True)
        )
        share = WINOGRAD if windows == (3, 3) and stride == 1 and groups == 1 else 1.0
        return self._convolution(source, Tensor("", channels, extent), math.prod(windows), extent, groups, bias, shared, share)

    def transposed(self, source: Tensor, channels: int, window: int = 2, *, bias: bool = False) -> Tensor:
        """A transposed convolution whose stride is its window: each position of the input makes a window of the output."""
        extent = tuple(size * window for size in source.extent)
        taps = window ** len(extent)
        made = Tensor("", channels, extent)
        return self._convolution(source, made, taps, source.extent, 1, bias, False, transposed=True)

    def _convolution(
        self,
        source: Tensor,
        made: Tensor,
        taps: int,
        rows: tuple[int, ...],
        groups: int,
        bias: bool,
        shared: bool,
        winograd_share: float = 1.0,
        *,
        transposed: bool = False,
    ) -> Tensor:
        name = self._named("conv")
        inside = self._size(name, "in", source.channels // groups)
        window, columns = self._size(name, "window", taps), self._size(name, "out", made.channels)
        positions = self._size(name, "rows", math.prod(rows))
        wide = self._size(name, "read", source.channels * source.positions)
        output: Shape = (("batch", positions, columns, window),) if transposed else (("batch", positions, columns),)
        weight: Shape = () if shared else ((inside, window, columns),) + (((columns,),) if bias else ())
        self._sizes[f"{name}.groups"], self._sizes[f"{name}.dims"] = groups, len(rows)
        return self._add(
            Op(
                name=name,
                type=OpType.CONVOLUTION,
                inputs=(self._input(source),),
                output=output,
                reads=(("batch", wide),),
                rows=(("batch", positions),),
                reduction=((inside,),) if transposed else ((inside, window),),
                columns=((columns, window),) if transposed else ((columns,),),
                weight=weight,
                winograd_share=winograd_share,
                saves=(self._input(source),),
            ),
            made,
        )

    def norm(self, source: Tensor, added: Tensor | None = None) -> Tensor:
        """Batch, instance or group norm: two parameters a channel.

        What follows it element by element is fused with it: a sum with another tensor, ReLU (cuDNN's
        CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION, and compilers).
        """
        channels = self._size(self._named("norm"), "channels", source.channels)
        weight: Shape = ((channels,), (channels,)) if self.norm_weight else ()
        role, others = OpRole.INSTANCE_NORM if self.instances else OpRole.NORM, () if added is None else (added,)
        normed = self._pointwise("norm", source, *others, role=role, weight=weight, saves=(source,) if weight else ())
        return Tensor(normed.op, source.channels, source.extent)

    def activation(self, source: Tensor) -> Tensor:
        """ReLU that nothing is fused with, in place: the next op keeps its output."""
        return self._pointwise("activation", source, role=OpRole.ACTIVATION)

    def conv_norm(self, source: Tensor, channels: int, window: int | tuple[int, ...] = 3, **more: object) -> Tensor:
        """A convolution with norm and ReLU."""
        return self.norm(self.conv(source, channels, window, **more))  # type: ignore[arg-type]

    def add(self, first: Tensor, second: Tensor) -> Tensor:
        """The sum of two tensors."""
        return self._pointwise("sum", first, second, role=OpRole.RESIDUAL)

    def joined(self, *sources: Tensor) -> Tensor:
        """Tensors side by side, along their channels."""
        made = Tensor("", sum(source.channels for source in sources), sources[0].extent)
        return self._pointwise("joined", *sources, made=made)

    def pool(self, source: Tensor, window: int = 2, *, stride: int | None = None, padding: int = 0, up: bool = False) -> Tensor:
        """The largest, or the mean, of each window; `up`: rounded up at the border."""
        step = window if stride is None else stride
        rounded = step - 1 if up else 0
        extent = tuple((size + 2 * padding - window + rounded) // step + 1 for size in source.extent)
        return self._pointwise("pool", source, made=Tensor("", source.channels, extent), saves=(source,))

    def pooled(self, source: Tensor, extent: int = 1) -> Tensor:
        """Means over all positions, or over a grid of `extent` on each side."""
        return self._pointwise("pool", source, made=Tensor("", source.channels, (extent,) * len(source.extent)))

    def upsampled(self, source: Tensor, extent: tuple[int, ...]) -> Tensor:
        """Nearest neighbours, or between them."""
        return self._pointwise("upsample", source, made=Tensor("", source.channels, extent))

    def scaled(self, source: Tensor, squeezed: int) -> Tensor:
        """Channels times what a small network says of their means (squeeze and excitation, Hu et al. 2018)."""
        gate = self.pooled(source)
        for channels in (squeezed, source.channels):
            gate = self.conv(gate, channels, 1, bias=True)
        return self._pointwise("scale", source, gate, made=Tensor("", source.channels, source.extent), saves=(source, gate))

    def linear(self, source: Tensor, columns: int, *, bias: bool = True, rows: int = 1, name: str | None = None) -> Tensor:
        """A fully connected layer over all that a sample, or each of its `rows`, has."""
        name = name or self._named("linear")
        inside = self._size(name, "in", source.channels * source.positions // (rows if source.extent == (rows,) else 1))
        outside, each = self._size(name, "out", columns), self._size(name, "rows", rows)
        return self._add(
            Op(
                name=name,
                type=OpType.MATMUL,
                inputs=(self._input(source),),
                output=(("batch", each, outside),),
                reads=(("batch", each, inside),),
                rows=(("batch", each),),
                reduction=((inside,),),
                columns=((outside,),),
                weight=((inside, outside),) + (((outside,),) if bias else ()),
                saves=(self._input(source),),
            ),
            Tensor("", columns, (rows,)),
        )

    def product(self, source: Tensor, vectors: int, width: int, kept: int) -> Tensor:
        """Products of each pair of a sample's vectors (the interaction of DLRM, Naumov et al. 2019)."""
        name = self._named("product")
        rows, columns = self._size(name, "rows", vectors), self._size(name, "columns", vectors)
        inside, outside = self._size(name, "in", width), self._size(name, "out", kept)
        return self._add(
            Op(
                name=name,
                type=OpType.MATMUL,
                inputs=(self._input(source),),
                output=(("batch", outside),),
                reads=(("batch", rows, inside),),
                rows=(("batch", rows),),
                reduction=((inside,),),
                columns=((columns,),),
                saves=(self._input(source),),
            ),
            Tensor("", kept, (1,)),
        )

    def table(self, rows: int, width: int, *, lookups: int = 1) -> Tensor:
        """An embedding table that every rank has, of which a sample reads some rows."""
        name = self._named("table")
        many, wide = self._size(name, "rows", rows), self._size(name, "width", width)
        each = self._size(name, "lookups", lookups)
        op = Op(
            name=name,
            type=OpType.GATHER,
            output=(("batch", each, wide),),
            weight=((many, wide),),
        )
        return self._add(op, Tensor("", width, (lookups,)))

    def shared_tables(self, tables: int, rows: int, width: int, *, lookups: float = 1.0) -> Tensor:
        """Embedding tables that ranks share: each looks rows up for all samples, and sends each rank its vectors (hybrid parallel).

        `lookups` is how many rows of each table a sample reads, which are summed.
        """
        self._sizes |= {"experts": tables, "table.rows": rows, "table.width": width, "table.lookups": lookups}
        sent: Shape = (("experts", "capacity"),)
        vectors: Shape = (("experts", "capacity", "table.width"),)
        self._ops.append(
            Op(name="dispatch", type=OpType.DISPATCH, inputs=("",), output=(("experts", "capacity", "table.lookups"),), reads=sent)
        )
        self._ops.append(
            Op(
                name="tables",
                type=OpType.GATHER,
                inputs=("dispatch",),
                output=vectors,
                reads=(("experts", "capacity", "table.lookups", "table.width"),),
                weight=(("experts", "table.rows", "table.width"),),
                sparse=True,
            )
        )
        joined = self._size("combine", "wide", tables * width)
        combine = Op(
            name="combine", type=OpType.COMBINE, inputs=("tables",), output=(("batch", joined),), reads=vectors, saves=("tables",)
        )
        return self._add(combine, Tensor("", tables * width, (1,)))

    def loss(self, *sources: Tensor) -> Tensor:
        """Softmax, or what else compares outputs with labels."""
        name = "loss" if "loss" not in self._made else self._named("loss")
        read = tuple(
            ("batch", self._size(name, f"read{place}", each.channels * each.positions)) for place, each in enumerate(sources)
        )
        names = tuple(dict.fromkeys(self._input(each) for each in sources))
        return self._add(
            Op(name=name, type=OpType.LOSS, inputs=names, output=(("batch",),), reads=read, saves=names), Tensor("", 1, (1,))
        )

    def _pointwise(
        self,
        kind: str,
        *sources: Tensor,
        made: Tensor | None = None,
        role: OpRole = OpRole.OTHER,
        weight: Shape = (),
        saves: tuple[Tensor, ...] = (),
    ) -> Tensor:
        name = self._named(kind)
        made = made or sources[0]
        read = tuple(
            ("batch", self._size(name, f"read{place}", each.channels * each.positions)) for place, each in enumerate(sources)
        )
        wide = self._size(name, "out", made.channels * made.positions)
        names = tuple(dict.fromkeys(self._input(each) for each in sources))
        return self._add(
            Op(
                name=name,
                type=OpType.POINTWISE,
                role=role,
                inputs=names,
                output=(("batch", wide),),
                reads=read,
                weight=weight,
                saves=tuple(self._input(each) for each in saves),
            ),
            Tensor("", made.channels, made.extent),
        )

    def _add(self, op: Op, made: Tensor) -> Tensor:
        self._ops.append(replace(op, frozen=True, saves=()) if self.frozen else op)
        self._made.add(op.name)
        return Tensor(op.name, made.channels, made.extent)

    def _named(self, kind: str) -> str:
        return f"{kind}{len(self._ops)}"

    def _size(self, op: str, what: str, size: float) -> str:
        self._sizes[f"{op}.{what}"] = size
        return f"{op}.{what}"

    def _input(self, source: Tensor) -> str:
        """The op of this block that made a tensor; one of another block is among the block's inputs."""
        return source.op if source.op in self._made else ""


def _each(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)
