"""`adapted`: a block of a transformer whose weights stay as they are, with low-rank adapters beside some matrices (LoRA).

Beside a matrix W of n x m an adapter adds ``alpha / rank * x A B`` with A of n x rank and B of rank x m (Hu et al. 2021, "LoRA",
section 4.1). A matmul with a fixed weight needs no input kept for it; A needs the input of W, and B that of A. As in PEFT
(tuners/lora/layer.py), torchtune (modules/peft/lora.py) and Megatron-Bridge (peft/lora_layers.py) A and B, the factor and the sum
are kernels of their own. Dropout in front of an adapter is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dpro_search.errors import InputError
from dpro_search.parallel.model.architecture import Adapters
from dpro_search.parallel.model.block import Block
from dpro_search.parallel.model.op import RANK, Op, OpRole, OpType, Shape

_ALL = slice(None)
TARGETS: Mapping[str, tuple[str, slice]] = {
    # Hugging Face's names, and those of torchtune and LitGPT are much the same; each of an op's matrices has an adapter of its own.
    "q_proj": (".qkv", slice(0, 1)),
    "k_proj": (".qkv", slice(1, 2)),
    "v_proj": (".qkv", slice(2, 3)),
    "o_proj": ("attention.output", _ALL),
    "gate_proj": ("feed_forward.up", slice(0, -1)),
    "up_proj": ("feed_forward.up", slice(-1, None)),
    "down_proj": ("feed_forward.down", _ALL),
    "lm_head": ("head", _ALL),
    # Megatron-Core's, whose matrices side by side share an adapter.
    "linear_qkv": (".qkv", _ALL),
    "linear_proj": ("attention.output", _ALL),
    "linear_fc1": ("feed_forward.up", _ALL),
    "linear_fc2": ("feed_forward.down", _ALL),
}
"""Matrices that adapters can be beside: how the name of their op ends, and which of its columns they are."""


def adapted(block: Block, adapters: Adapters) -> Block:
    """The block with fixed weights and its adapters.

    Where the rank is not known, attention's matmuls keep their inputs for the adapters that most models have there.
    """
    ops: list[Op] = []
    for op in block.ops:
        read = op.type is not OpType.MATMUL or (not adapters.rank and op.name.startswith("attention"))
        ops.append(replace(op, fixed=True, saves=op.saves if read else ()))
        if adapters.rank and op.rows:
            ops += [part for target in dict.fromkeys(adapters.targets) for part in _adapter(op, target)]
    return replace(block, ops=tuple(ops), sizes={**block.sizes, RANK: adapters.rank})


def check_targets(blocks: tuple[Block, ...], adapters: Adapters) -> None:
    """Raise `InputError` where a model lacks a matrix that adapters are beside."""
    names = {target for target in TARGETS for block in blocks for op in block.ops if op.rows and any(_adapter(op, target))}
    for target in adapters.targets:
        if target not in names:
            others = ", ".join(name for name in TARGETS if name in names)
            raise InputError(f"'{target}' is no matrix of this model that adapters can be beside (experts are none): {others}")


def _adapter(op: Op, target: str) -> Iterator[Op]:
    """The ops of an adapter beside an op; none if it is not the target."""
    ending, part = TARGETS[target]
    columns = op.columns[part] if op.name.endswith(ending) else ()
    if not columns:
        return
    (row,) = op.rows
    name, low, shape = f"{op.name}.{target}", (RANK,), tuple((*row, *term) for term in columns)
    yield _product(f"{name}.a", op.inputs[0], row, op.reduction[0], (low,))
    yield _product(f"{name}.b", f"{name}.a", row, low, columns)
    yield Op(name=f"{name}.sum", type=OpType.POINTWISE, role=OpRole.ADAPTER, inputs=(f"{name}.b",), output=shape, reads=shape * 2)


def _product(name: str, source: str, row: tuple[str, ...], reduction: tuple[str, ...], columns: Shape) -> Op:
    return Op(
        name=name,
        type=OpType.MATMUL,
        inputs=(source,),
        output=tuple((*row, *term) for term in columns),
        reads=((*row, *reduction),),
        rows=(row,),
        reduction=(reduction,),
        columns=columns,
        weight=tuple((*reduction, *term) for term in columns),
        saves=(source,),
    )
