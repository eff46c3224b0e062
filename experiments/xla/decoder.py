"""A decoder as MaxText trains it, written for compilers: its step for a mesh, without any values.

Runs in an environment with JAX alone. `training_step(mesh, config)` returns the jitted step, the shapes of its arguments, and the
tokens of a step. The axes of the mesh are MaxText's: data, fsdp, fsdp_transpose and tensor; those that are missing have one device.

Shardings are those of MaxText's logical axis rules (src/maxtext/configs/base.yml):

===================  ======================================================================
weights              embed over fsdp and fsdp_transpose; heads, mlp and vocabulary over tensor
weights of the MLP   embed over fsdp; mlp over fsdp_transpose and tensor
activations          batch over data, fsdp and fsdp_transpose; embed, heads and mlp over tensor
===================  ======================================================================

Weights, gradients and the states of AdamW are in fp32, products in bf16, the loss in fp32, and gradients are clipped by their norm.
"""

import functools
import math
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

PROJECTIONS = ("query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
BATCH = ("data", "fsdp", "fsdp_transpose")
EMBED = ("fsdp", "fsdp_transpose")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A model and the way in which it is trained.

    Attributes
    ----------
    block
        "llama" (RMSNorm, gated MLP), "gpt3" (LayerNorm, GELU, one product for queries, keys and values, learned positions) or
        "gemma3" (norms before and after, five layers with a window and one without, norms of queries and keys).
    gated
        The MLP multiplies two products (SwiGLU, GeGLU); else it has one, with a ReLU (llama) or GELU (gpt3).
    saved, offloaded
        Names of tensors that the forward pass keeps on the device, and in the host's memory; all others are computed again.
    iota_embed
        Embeddings are looked up by a product with one-hot vectors (MaxText's use_iota_embed).
    attention_block
        Rows and columns of a block of the attention kernel; 0: attention by products, without a kernel.
    compiled_block
        Block with which the kernel is compiled; 0: the same. Smaller ones compile in less time. Operations are those of
        `attention_block`, as nothing else about the kernel is priced.
    fused_backward
        One kernel does the whole backward pass of attention.
    bf16_weights
        Weights and the states of AdamW are in bf16 (MaxText's weight_dtype).
    """

    block: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    sequence: int
    per_device_batch: int
    tied: bool = False
    gated: bool = True
    window: int = 0
    saved: tuple = ()
    offloaded: tuple = ()
    iota_embed: bool = False
    attention_block: int = 512
    compiled_block: int = 0
    fused_backward: bool = False
    bf16_weights: bool = False

    @property
    def layers_per_turn(self):
        """Layers that one turn of the scan runs."""
        return 6 if self.block == "gemma3" else 1


def training_step(mesh, config):
    """The step for a mesh: the jitted function, the shapes of its arguments, and its tokens."""
    shapes = weight_shapes(config)
    kind = jnp.bfloat16 if config.bf16_weights else jnp.float32
    weights = {name: shaped(mesh, shape, spec, kind) for name, (shape, spec) in shapes.items()}
    batch = config.per_device_batch * mesh.devices.size
    tokens = shaped(mesh, (batch, config.sequence), (BATCH, None), jnp.int32)
    state = {"weights": weights, "first": weights, "second": weights, "count": shaped(mesh, (), (), jnp.int32)}
    step = jax.jit(functools.partial(train, config, mesh), donate_argnums=0)
    return step, (state, {"inputs": tokens, "targets": tokens}), batch * config.sequence


def weight_shapes(config):
    """Shape and sharding of each weight; those of layers have their turns in front: {name: (shape, names of axes)}."""
    turns, hidden, per_turn = config.layers // config.layers_per_turn, config.hidden, config.layers_per_turn
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = {
        "out": ((queries, hidden), ("tensor", EMBED)),
        "down": ((config.ffn_hidden, hidden), (("fsdp_transpose", "tensor"), "fsdp")),
    }
    up = ((hidden, config.ffn_hidden), ("fsdp", ("fsdp_transpose", "tensor")))
    if config.block == "gpt3":
        layer |= {"qkv": ((hidden, 3, queries), (EMBED, None, "tensor")), "up": up}
        layer |= {"qkv_bias": ((3, queries), (None, "tensor")), "out_bias": ((hidden,), (None,))}
        layer |= {"up_bias": ((config.ffn_hidden,), ("tensor",)), "down_bias": ((hidden,), (None,))}
        norms = ("before_attention", "before_attention_bias", "before_mlp", "before_mlp_bias")
    else:
        layer |= {"query": ((hidden, queries), (EMBED, "tensor")), "up": up} | ({"gate": up} if config.gated else {})
        layer |= dict.fromkeys(("key", "value"), ((hidden, keys), (EMBED, "tensor")))
        norms = ("before_attention", "before_mlp")
    if config.block == "gemma3":
        norms += ("after_attention", "after_mlp")
        layer |= dict.fromkeys(("query_norm", "key_norm"), ((config.head_dim,), (None,)))
    layer |= dict.fromkeys(norms, ((hidden,), ("tensor",)))
    shapes = {
        f"layer{number}/{name}": ((turns, *shape), (None, *spec))
        for number in range(per_turn)
        for name, (shape, spec) in layer.items()
    }
    shapes["embedding"] = ((config.vocab, hidden), ("tensor", EMBED))
    shapes["last_norm"] = ((hidden,), ("tensor",))
    if not config.tied:
        shapes["logits"] = ((hidden, config.vocab), (EMBED, "tensor"))
    if config.block == "gpt3":
        shapes |= {"last_norm_bias": ((hidden,), ("tensor",)), "positions": ((config.sequence, hidden), (None, EMBED))}
    return shapes


def weight_count(config):
    return sum(math.prod(shape) for shape, _ in weight_shapes(config).values())


def train(config, mesh, state, batch):
    """AdamW with gradients clipped by their norm (MaxText's opt_type and gradient_clipping_threshold)."""
    value, grads = jax.value_and_grad(functools.partial(loss, config, mesh))(state["weights"], batch)
    grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda grad: jnp.where(norm < 1.0, grad, grad / norm), grads)
    count = state["count"] + 1
    first = jax.tree.map(lambda moment, grad: 0.9 * moment + 0.1 * grad, state["first"], grads)
    second = jax.tree.map(lambda moment, grad: 0.95 * moment + 0.05 * grad * grad, state["second"], grads)
    shrink = [1 - jnp.power(decay, count.astype(jnp.float32)) for decay in (0.9, 0.95)]

    def updated(weight, first, second):
        return weight - 3e-5 * (first / shrink[0] / (jnp.sqrt(second / shrink[1]) + 1e-8) + 0.1 * weight)

    weights = jax.tree.map(updated, state["weights"], first, second)
    new = {"weights": weights, "first": first, "second": second}
    kept = {name: jax.tree.map(lambda value, old: value.astype(old.dtype), new[name], state[name]) for name in new}
    return {**kept, "count": count}, {"loss": value, "norm": norm}


def loss(config, mesh, weights, batch):
    """Mean cross entropy of the next tokens, in fp32."""
    layers = {name: value for name, value in weights.items() if name.startswith("layer")}
    x = embedded(config, mesh, weights, batch["inputs"])
    turn = jax.checkpoint(functools.partial(layers_of_turn, config, mesh), policy=policy(config), prevent_cse=False)
    x, _ = jax.lax.scan(turn, x, layers)
    x = norm(config, x, weights["last_norm"], weights.get("last_norm_bias"))
    table = weights["embedding"].T if config.tied else weights["logits"]
    logits = placed(mesh, x @ table.astype(jnp.bfloat16), BATCH, None, "tensor").astype(jnp.float32)
    picked = jnp.sum(logits * jax.nn.one_hot(batch["targets"], config.vocab, dtype=jnp.float32), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def embedded(config, mesh, weights, tokens):
    table = weights["embedding"].astype(jnp.bfloat16)
    if config.iota_embed:
        rows = placed(mesh, jax.nn.one_hot(tokens, config.vocab, dtype=jnp.bfloat16), BATCH, None, None)
        x = rows @ table
    else:
        x = table[tokens]
    if "positions" in weights:
        x = x + weights["positions"].astype(jnp.bfloat16)
    return activations(mesh, x)


def policy(config):
    """The tensors that are kept for the backward pass (MaxText's remat_policy)."""
    policies = jax.checkpoint_policies
    if config.offloaded:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(config.saved),
            names_which_can_be_offloaded=list(config.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    return policies.save_only_these_names(*config.saved) if config.saved else policies.nothing_saveable


def layers_of_turn(config, mesh, x, weights):
    for number in range(config.layers_per_turn):
        prefix = f"layer{number}/"
        layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        window = config.window if config.block == "gemma3" and number < config.layers_per_turn - 1 else 0
        x = decoder_layer(config, mesh, window, x, layer)
    return x, None


def decoder_layer(config, mesh, window, x, weights):
    x = checkpoint_name(activations(mesh, x), "decoder_layer_input")
    y = activations(mesh, norm(config, x, weights["before_attention"], weights.get("before_attention_bias")))
    query, key, value = projected(config, mesh, y, weights)
    y = attention(config, mesh, window, query, key, value)
    y = y @ weights["out"].astype(jnp.bfloat16)
    y = checkpoint_name(activations(mesh, with_bias(y, weights, "out_bias")), "out_proj")
    if "after_attention" in weights:
        y = norm(config, y, weights["after_attention"])
    x = activations(mesh, x + y)
    y = activations(mesh, norm(config, x, weights["before_mlp"], weights.get("before_mlp_bias")))
    y = activations(mesh, mlp(config, mesh, y, weights))
    if "after_mlp" in weights:
        y = norm(config, y, weights["after_mlp"])
    return activations(mesh, x + y)


def projected(config, mesh, y, weights):
    """Queries, keys and values, [batch, sequence, heads, head_dim]."""
    sizes = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
    if config.block == "gpt3":
        together = jnp.einsum("bsh,hct->bsct", y, weights["qkv"].astype(jnp.bfloat16))
        together = checkpoint_name(with_bias(together, weights, "qkv_bias"), "qkv_proj")
        parts = dict(zip(sizes, jnp.moveaxis(together, 2, 0), strict=True))
    else:
        parts = {name: y @ weights[name].astype(jnp.bfloat16) for name in sizes}
    parts = {name: split_heads(mesh, part, sizes[name]) for name, part in parts.items()}
    if config.block == "gemma3":
        parts |= {name: norm(config, parts[name], weights[f"{name}_norm"]) for name in ("query", "key")}
    if config.block != "gpt3":
        parts |= {name: rotated(parts[name]) for name in ("query", "key")}
        parts = {name: checkpoint_name(part, f"{name}_proj") for name, part in parts.items()}
    return parts["query"] / math.sqrt(config.head_dim), parts["key"], parts["value"]


def split_heads(mesh, x, heads):
    return placed(mesh, x.reshape(*x.shape[:2], heads, -1), BATCH, None, "tensor", None)


def rotated(x):
    """Rotary embedding of [batch, sequence, heads, head_dim]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sine, cosine = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    low, high = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1).astype(jnp.bfloat16)


def mlp(config, mesh, y, weights):
    up = checkpoint_name(with_bias(y @ weights["up"].astype(jnp.bfloat16), weights, "up_bias"), "mlpwi_1")
    if not config.gated:
        up = jax.nn.gelu(up) if config.block == "gpt3" else jax.nn.relu(up)
    else:
        gate = checkpoint_name(y @ weights["gate"].astype(jnp.bfloat16), "mlpwi_0")
        up = (jax.nn.gelu(gate) if config.block == "gemma3" else jax.nn.silu(gate)) * up
    up = placed(mesh, up, BATCH, None, "tensor")
    return checkpoint_name(with_bias(up @ weights["down"].astype(jnp.bfloat16), weights, "down_bias"), "mlpwo")


def attention(config, mesh, window, query, key, value):
    """Causal attention of [batch, sequence, heads, head_dim]: [batch, sequence, heads * head_dim]."""
    if not config.attention_block:
        return by_products(window, query, key, value)
    spec = P(axis_of(mesh, BATCH), axis_of(mesh, "tensor"), None, None)
    local = config.heads // mesh.shape.get("tensor", 1)
    kernel = attention_kernel(config, local, window)
    sharded = jax.shard_map(jax.vmap(kernel), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    result = sharded(*(jnp.swapaxes(each, 1, 2) for each in (query, key, value)))
    return jnp.swapaxes(result, 1, 2).reshape(*query.shape[:2], -1)


def by_products(window, query, key, value):
    batch, sequence, heads, size = query.shape
    query = query.reshape(batch, sequence, key.shape[2], -1, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key).astype(jnp.float32)
    rows, columns = jnp.arange(sequence)[:, None], jnp.arange(sequence)
    seen = (columns <= rows) & (columns > rows - window if window else True)
    shares = jax.nn.softmax(jnp.where(seen, scores, -1e9)).astype(jnp.bfloat16)
    return jnp.einsum("bkgqs,bskd->bqkgd", shares, value).reshape(batch, sequence, heads * size)


@functools.cache
def attention_kernel(config, heads, window):
    """JAX's own splash attention of [heads, sequence, head_dim], which tells the compiler its operations."""
    from jax.experimental import pallas
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sequence, shape = config.sequence, (config.sequence, config.sequence)
    mask = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
    block = min(config.attention_block, sequence)
    pairs = sequence * (window + block if window else (sequence + block) // 2)  # of blocks that are not empty
    splash.pl = types.SimpleNamespace(**vars(pallas))
    splash.pl.pallas_call = functools.partial(call_with_estimate, pallas, heads * pairs * config.head_dim, config.fused_backward)
    names = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    names += [] if config.fused_backward else ["block_q_dq", "block_kv_dq"]
    size = min(config.compiled_block or block, sequence)
    sizes = splash.BlockSizes(**dict.fromkeys(names, size), use_fused_bwd_kernel=config.fused_backward)
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name="context"
    )


# Matrix products of each kernel: two forward (scores, result), three for the gradient of queries, four for those of keys and
# values; five if one kernel does all of the backward pass.
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
FUSED_PRODUCTS = {"fwd": 2, "dkv": 5}


def call_with_estimate(pallas, pair_products, fused, *arguments, name, **options):
    products = next(count for phase, count in (FUSED_PRODUCTS if fused else PRODUCTS).items() if f"_{phase}_" in name)
    estimate = pallas.CostEstimate(flops=2 * products * pair_products, transcendentals=0, bytes_accessed=0)
    return pallas.pallas_call(*arguments, name=name, cost_estimate=estimate, **options)


def norm(config, x, weight, bias=None):
    """RMSNorm, or LayerNorm if there is a bias, in fp32."""
    x = x.astype(jnp.float32)
    if bias is not None:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)
    x = x * weight.astype(jnp.float32)
    return (x if bias is None else x + bias.astype(jnp.float32)).astype(jnp.bfloat16)


def with_bias(x, weights, name):
    return x + weights[name].astype(jnp.bfloat16) if name in weights else x


def activations(mesh, x):
    return placed(mesh, x, BATCH, None, "tensor")


def placed(mesh, x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*(axis_of(mesh, axes) for axes in spec))))


def shaped(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*(axis_of(mesh, axes) for axes in spec))))


def axis_of(mesh, axes):
    """Those of the axes that the mesh has, as a sharding takes them; None: no axis."""
    names = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis in mesh.shape)
    return names or None
