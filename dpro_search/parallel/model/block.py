"""`blocks_of`: the blocks of a transformer (embedding, layers, head), each a list of ops in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from dpro_search.parallel.model.architecture import Architecture, Attention, Experts, FeedForward, Layer, Positions
from dpro_search.parallel.model.op import Op, OpRole, OpType, Shape, elements

TOKENS = ("batch", "sequence")
STREAM: Shape = (("batch", "sequence", "hidden"),)
ROWS: Shape = (TOKENS,)
SENT: Shape = (("experts", "capacity", "hidden"),)  # tokens at the experts that they visit
INPUT = ""  # the name of a block's input


@dataclass(frozen=True, kw_only=True)
class Block:
    """Ops that run one after the other, `count` times."""

    name: str
    count: int
    ops: tuple[Op, ...]
    # Sizes of dims that do not depend on the batch. "context" is the number of keys that a query sees on average, as a share of the
    # sequence's length, "context_limit" at most so many; "keys" is the number of keys that there are.
    sizes: Mapping[str, float] = field(default_factory=dict)
    context_share: float = 1.0
    context_limit: float | None = None
    top_k: int = 0  # Experts that a token visits.
    sequence_share: float = 1.0  # Of a decoder that reads an encoder: its tokens, as a share of the encoder's ("source").

    def sizes_at(self, batch: int, sequence: int) -> dict[str, float]:
        """Sizes of all dims for a batch of sequences.

        A causal query at position i of n sees i keys, at most the window w: on average n / 2, or w - w^2 / (2 n).
        """
        source, limit = sequence, self.context_limit
        sequence = max(round(sequence * self.sequence_share), 1)
        context = sequence * self.context_share
        if limit is not None and limit < sequence:
            context = limit - limit**2 / (2 * sequence) if self.context_share < 1 else limit
        sizes = {**self.sizes, "batch": batch, "sequence": sequence, "context": context, "keys": sequence, "source": source}
        if self.top_k:
            sizes["capacity"] = batch * sequence * self.top_k / self.sizes["experts"]
        return sizes

    def parameters(self) -> float:
        """Parameters of one repetition."""
        return sum(elements(op.weight, self.sizes) for op in self.ops)


def blocks_of_transformer(architecture: Architecture) -> tuple[Block, ...]:
    """Embedding, layers (equal ones as one block), head."""
    layers = (
        _layer(architecture, layer, f"layer{number}" if len(architecture.layers) > 1 else "layer")
        for number, layer in enumerate(architecture.layers)
    )
    return (_embedding(architecture), *layers, _head(architecture))


def _embedding(model: Architecture) -> Block:
    sizes: dict[str, float] = {"hidden": model.hidden, "vocab": model.vocab, "patch": model.patch_inputs, "one": 1}
    if model.patch_inputs:
        patches = ((*TOKENS, "patch"),)
        weight = (("patch", "hidden"), ("hidden",))
        embed = Op(
            name="patches",
            type=OpType.MATMUL,
            output=STREAM,
            reads=patches,
            rows=ROWS,
            reduction=(("patch",),),
            columns=(("hidden",),),
            weight=weight,
        )
    else:
        embed = Op(name="tokens", type=OpType.GATHER, output=STREAM, weight=(("vocab", "hidden"),), summed=("vocab",))
    ops = [embed]
    tables: Shape = ()
    if model.positions is Positions.LEARNED:
        tables += (("positions", "hidden"),)
        sizes["positions"] = model.max_positions
    if model.token_types:
        tables += (("token_types", "hidden"),)
        sizes["token_types"] = model.token_types
    if model.positions is Positions.RELATIVE:
        tables += (("relative",),)  # of the first layer of each kind
        sizes["relative"] = model.max_positions * sum(layer.attention.heads for layer in model.layers)
    if model.patch_inputs:
        tables += (("hidden",),)  # the class token
    if any(layer.cross_attention for layer in model.layers):
        tables += (("hidden",),)  # the encoder's last norm
    if tables:
        ops.append(Op(name="positions", type=OpType.POINTWISE, inputs=(embed.name,), output=STREAM, reads=STREAM, weight=tables))
    if model.embedding_norm:
        ops.append(_norm(model, "norm", ops[-1].name))
    return Block(name="embedding", count=1, ops=tuple(ops), sizes=sizes)


def _head(model: Architecture) -> Block:
    ops: list[Op] = []
    sizes: dict[str, float] = {"hidden": model.hidden, "vocab": model.classes or model.vocab}
    last = INPUT

    def add(op: Op) -> None:
        nonlocal last
        ops.append(op)
        last = op.name

    if model.final_norm:
        add(_norm(model, "norm", last))
    if model.pooler:  # reads the first token of each sequence only, beside the head
        ops.append(_matmul("pooler", last, ("hidden",), (("pooled",),), bias=True, rows=(("batch",),)))
        ops.append(_matmul("next_sentence", "pooler", ("pooled",), (("two",),), bias=True, rows=(("batch",),)))
        sizes |= {"pooled": model.hidden, "two": 2}
    if model.head_transform:
        add(_matmul("transform", last, ("hidden",), (("transformed",),), bias=True))
        sizes["transformed"] = model.hidden
        add(_pointwise("activation", (last,), ((*TOKENS, "transformed"),), saves=(last,), role=OpRole.ACTIVATION))
        add(_norm(model, "transform_norm", last))
    head = _matmul("head", last, ("hidden",), (("vocab",),), bias=model.head_bias)
    if model.tied:
        head = _without_weight(head, (("vocab",),) if model.head_bias else ())
    add(head)
    logits: Shape = ((*TOKENS, "vocab"),)
    add(Op(name="loss", type=OpType.LOSS, inputs=(last,), output=ROWS, reads=logits, summed=("vocab",), saves=(last,)))
    share = model.target_share if any(layer.cross_attention for layer in model.layers) else 1.0
    return Block(name="head", count=1, ops=tuple(ops), sizes=sizes, sequence_share=share)


def _layer(model: Architecture, layer: Layer, name: str) -> Block:
    attention, feed_forward = layer.attention, layer.feed_forward
    ops: list[Op] = [_norm(model, "attention_norm", INPUT)]
    ops += _attention(model, attention, "attention", "attention_norm")
    if model.parallel_residual:
        stream, normed = INPUT, "attention_norm"
    else:
        ops.append(_residual(model, "attention_residual", INPUT, ops[-1].name))
        stream, normed = "attention_residual", "feed_forward_norm"
    if layer.cross_attention is not None:
        ops.append(_norm(model, "cross_norm", stream))
        ops += _attention(model, layer.cross_attention, "cross_attention", "cross_norm")
        ops.append(_residual(model, "cross_residual", stream, ops[-1].name))
        stream = "cross_residual"
    if normed == "feed_forward_norm":
        ops.append(_norm(model, normed, stream))
    parts = list(
        _experts(feed_forward, normed) if isinstance(feed_forward, Experts) else _feed_forward(feed_forward, normed, "ffn")
    )
    attended = ops[-1].name
    ops += parts
    if layer.norms == 4:
        ops.append(_norm(model, "after_attention_norm", attended))
        ops.append(_norm(model, "after_feed_forward_norm", parts[-1].name))
    ops.append(_residual(model, "residual", stream, ops[-1].name))
    return Block(
        name=name,
        count=layer.count,
        ops=tuple(ops),
        sizes=_layer_sizes(model, layer),
        context_share=0.5 if attention.causal else 1.0,
        context_limit=attention.window,
        top_k=feed_forward.top_k if isinstance(feed_forward, Experts) else 0,
        sequence_share=model.target_share if layer.cross_attention is not None else 1.0,
    )


def _layer_sizes(model: Architecture, layer: Layer) -> dict[str, float]:
    attention, feed_forward = layer.attention, layer.feed_forward
    sizes: dict[str, float] = {
        "hidden": model.hidden,
        "heads": attention.heads,
        "kv_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "value_dim": attention.head_dim if attention.value_dim is None else attention.value_dim,
        "query_rank": attention.query_rank or 0,
        "kv_rank": attention.kv_rank or 0,
        "rotary": attention.rotary_dim,
        "plain": attention.head_dim - attention.rotary_dim,
        "one": 1,
    }
    if isinstance(feed_forward, Experts):
        sizes |= {"experts": feed_forward.count, "choices": feed_forward.count, "expert_ffn": feed_forward.hidden}
        sizes["shared_ffn"] = feed_forward.shared_hidden
    else:
        sizes["ffn"] = feed_forward.hidden
    return sizes


def _attention(model: Architecture, attention: Attention, name: str, normed: str) -> Iterator[Op]:
    queries, values = ("heads", "head_dim"), ("heads", "value_dim")
    if attention.latent:
        yield from _latent_projections(attention, name, normed)
        columns: Shape = (queries, queries, values)
        read = f"{name}.rotation"
        yield _pointwise(read, (f"{name}.queries", f"{name}.keys_values"), _of_tokens(columns), role=OpRole.ROTATION)
    else:
        columns = (queries, ("kv_heads", "head_dim"), ("kv_heads", "value_dim"))
        read = f"{name}.qkv"
        yield _matmul(read, normed, ("hidden",), columns, bias=attention.bias)
        if attention.qk_norm:
            weight: Shape = (("head_dim",), ("head_dim",))
            yield _pointwise(f"{name}.qk_norm", (read,), _of_tokens(columns), weight=weight, saves=(read,), role=OpRole.NORM)
            read = f"{name}.qk_norm"
        if model.positions is Positions.ROTARY:
            yield _pointwise(f"{name}.rotation", (read,), _of_tokens(columns), role=OpRole.ROTATION)
            read = f"{name}.rotation"
    core = f"{name}.core"
    yield Op(
        name=core,
        type=OpType.ATTENTION,
        inputs=(read,),
        output=((*TOKENS, *values),),
        reads=_of_tokens(columns),
        weight=(("heads",),) if attention.sinks else (),
        saves=(read, core),
        flops=((*TOKENS, "context", *queries), (*TOKENS, "context", *values)),
        flops_factor=2.0,
    )
    output_bias = attention.bias if attention.output_bias is None else attention.output_bias
    yield _matmul(f"{name}.output", core, values, (("hidden",),), bias=output_bias)


def _latent_projections(attention: Attention, name: str, normed: str) -> Iterator[Op]:
    source, reduction = normed, "hidden"
    if attention.query_rank is not None:
        yield _matmul(f"{name}.query_down", normed, ("hidden",), (("query_rank",),))
        latent: Shape = ((*TOKENS, "query_rank"),)
        source, reduction = f"{name}.query_norm", "query_rank"
        read = (f"{name}.query_down",)
        yield _pointwise(source, read, latent, weight=(("query_rank",),), saves=read, role=OpRole.NORM)
    yield _matmul(f"{name}.queries", source, (reduction,), (("heads", "head_dim"),))
    down: Shape = (("kv_rank",), ("rotary",))
    yield _matmul(f"{name}.kv_down", normed, ("hidden",), down)
    read = (f"{name}.kv_down",)
    yield _pointwise(f"{name}.kv_norm", read, _of_tokens(down), weight=(("kv_rank",),), saves=read, role=OpRole.NORM)
    yield _matmul(f"{name}.keys_values", f"{name}.kv_norm", ("kv_rank",), (("heads", "plain"), ("heads", "value_dim")))


def _feed_forward(feed_forward: FeedForward, normed: str, width: str, name: str = "feed_forward") -> Iterator[Op]:
    columns: Shape = ((width,), (width,)) if feed_forward.gated else ((width,),)
    yield _matmul(f"{name}.up", normed, ("hidden",), columns, bias=feed_forward.bias)
    inner: Shape = ((*TOKENS, width),)
    read, role = (f"{name}.up",), _activation(feed_forward)
    yield _pointwise(f"{name}.activation", read, inner, reads=_of_tokens(columns), saves=read, role=role)
    yield _matmul(f"{name}.down", f"{name}.activation", (width,), (("hidden",),), bias=feed_forward.bias)


def _experts(experts: Experts, normed: str) -> Iterator[Op]:
    """A router, the tokens sent to their experts, two (grouped) matmuls there, and the weighted sum of what returns."""
    yield _matmul("router", normed, ("hidden",), (("choices",),), bias=experts.router_bias)
    yield Op(name="dispatch", type=OpType.DISPATCH, inputs=(normed, "router"), output=SENT, reads=STREAM)
    places = ("experts", "capacity")
    columns: Shape = (("expert_ffn",), ("expert_ffn",)) if experts.gated else (("expert_ffn",),)

    def grouped(name: str, source: str, reduction: str, columns: Shape) -> Op:
        weight = tuple(("experts", reduction, *term) for term in columns)
        bias: Shape = tuple(("experts", *term) for term in columns) if experts.bias else ()
        output = tuple((*places, *term) for term in columns)
        return Op(
            name=name,
            type=OpType.MATMUL,
            inputs=(source,),
            output=output,
            rows=(places,),
            reduction=((reduction,),),
            columns=columns,
            weight=(*weight, *bias),
            saves=(source,),
        )

    yield grouped("experts.up", "dispatch", "hidden", columns)
    inner: Shape = ((*places, "expert_ffn"),)
    read, role = tuple((*places, *term) for term in columns), _activation(experts)
    yield _pointwise("experts.activation", ("experts.up",), inner, reads=read, saves=("experts.up",), role=role)
    yield grouped("experts.down", "experts.activation", "expert_ffn", (("hidden",),))
    made = "experts.down"
    if experts.bias:
        yield _pointwise("experts.biased", (made,), SENT, role=OpRole.EXPERT_BIAS)
        made = "experts.biased"
    combined = Op(
        name="combine",
        type=OpType.COMBINE,
        inputs=(made, "router"),
        output=STREAM,
        reads=SENT,
        saves=(made, "router"),
    )
    yield combined
    if experts.shared_hidden:
        shared = FeedForward(hidden=experts.shared_hidden, gated=experts.gated, bias=experts.bias)
        yield from _feed_forward(shared, normed, "shared_ffn", "shared_expert")
        if experts.shared_gate:
            yield _matmul("shared_expert.gate", normed, ("hidden",), (("one",),))
        yield _pointwise("experts_sum", ("combine", "shared_expert.down"), STREAM)


def _activation(layer: FeedForward | Experts) -> OpRole:
    return OpRole.GATED_ACTIVATION if layer.gated else OpRole.ACTIVATION


def _norm(model: Architecture, name: str, source: str) -> Op:
    weight: Shape = (("hidden",),) * ((1 + model.norm_bias) if model.norm_weight else 0)
    return _pointwise(name, (source,), STREAM, weight=weight, saves=(source,), role=OpRole.NORM)


def _residual(model: Architecture, name: str, stream: str, branch: str) -> Op:
    """The sum of a branch, with dropout where the model has it, and of the stream that it left."""
    op = _pointwise(name, (stream, branch), STREAM, reads=STREAM * 2, role=OpRole.RESIDUAL)
    return op if not model.dropout else _with_mask(op)


def _with_mask(op: Op) -> Op:
    return replace(op, saves_bytes=op.output)


def _without_weight(op: Op, weight: Shape) -> Op:
    return replace(op, weight=weight)


def _matmul(name: str, source: str, reduction: tuple[str, ...], columns: Shape, *, bias: bool = False, rows: Shape = ROWS) -> Op:
    (row,) = rows
    return Op(
        name=name,
        type=OpType.MATMUL,
        inputs=(source,),
        output=tuple((*row, *term) for term in columns),
        reads=((*row, *reduction),),
        rows=rows,
        reduction=(reduction,),
        columns=columns,
        weight=(*((*reduction, *term) for term in columns), *(columns if bias else ())),
        saves=(source,),
    )


def _pointwise(
    name: str,
    inputs: tuple[str, ...],
    output: Shape,
    *,
    reads: Shape | None = None,
    weight: Shape = (),
    saves: tuple[str, ...] = (),
    role: OpRole = OpRole.OTHER,
) -> Op:
    return Op(
        name=name,
        type=OpType.POINTWISE,
        role=role,
        inputs=inputs,
        output=output,
        reads=output if reads is None else reads,
        weight=weight,
        saves=saves,
    )


def _of_tokens(columns: Shape) -> Shape:
    return tuple((*TOKENS, *term) for term in columns)
