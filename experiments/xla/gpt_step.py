"""A GPT step whose mesh (fsdp, tp), rematerialisation and micro-batches may be chosen: always 1,024 sequences of 1,024 tokens.

`dpro-search capture --jax` runs it in the environment of `scripts/make_env.sh jax`; `python -m experiments.xla.meshes` compiles all
combinations.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HIDDEN, LAYERS, VOCAB, SEQUENCE, BATCH, HEADS = 4096, 4, 50304, 1024, 1024, 32

CHOICES = {"remat": ["full", "products", "none"], "micro_batches": [1, 4]}


def step(mesh, remat="full", micro_batches=1):
    def weight(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    blocks = {
        "scales": weight((None, None, None), LAYERS, 2, HIDDEN),
        "qkv": weight((None, "fsdp", None, "tp"), LAYERS, HIDDEN, 3, HIDDEN),
        "out": weight((None, "tp", "fsdp"), LAYERS, HIDDEN, HIDDEN),
        "up": weight((None, "fsdp", "tp"), LAYERS, HIDDEN, 4 * HIDDEN),
        "down": weight((None, "tp", "fsdp"), LAYERS, 4 * HIDDEN, HIDDEN),
    }
    params = {"embedding": weight(("tp", "fsdp"), VOCAB, HIDDEN), "positions": weight((None, "fsdp"), SEQUENCE, HIDDEN)}
    params["blocks"] = blocks
    state = {"params": params, "m": params, "v": params}
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32, sharding=NamedSharding(mesh, P("fsdp", None)))

    def norm(x, scale):
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, -1, keepdims=True)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5) * scale).astype(jnp.bfloat16)

    def block(x, w):
        w = {name: value.astype(jnp.bfloat16) for name, value in w.items()}
        h = norm(x, w["scales"][0])
        q, k, v = (
            constrain((h @ w["qkv"][:, part]).reshape(*h.shape[:2], HEADS, -1), "fsdp", None, "tp", None) for part in range(3)
        )
        scores = jnp.einsum("bsnd,btnd->bnst", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool)), scores, -1e30)
        mixed = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1).astype(jnp.bfloat16), v).reshape(h.shape)
        x = constrain(x + mixed @ w["out"], "fsdp", None, None)
        h = constrain(jax.nn.gelu(norm(x, w["scales"][1]) @ w["up"]), "fsdp", None, "tp")
        return constrain(x + h @ w["down"], "fsdp", None, None), None

    policies = {"full": None, "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    body = block if remat == "none" else jax.checkpoint(block, policy=policies[remat])

    def loss(params, tokens):
        x = params["embedding"].astype(jnp.bfloat16)[tokens] + params["positions"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(body, constrain(x, "fsdp", None, None), params["blocks"])
        logits = constrain((x @ params["embedding"].astype(jnp.bfloat16).T).astype(jnp.float32), "fsdp", None, "tp")
        picked = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def gradients(weights, tokens):
        """The gradients of all micro-batches, each with an equal part of every device's sequences."""
        if micro_batches == 1:
            return jax.grad(loss)(weights, tokens)
        parts = tokens.reshape(BATCH // micro_batches, micro_batches, SEQUENCE).swapaxes(0, 1)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, constrain(part, "fsdp", None))), None

        zeros = jax.tree.map(
            lambda value, like: jax.lax.with_sharding_constraint(jnp.zeros_like(value), like.sharding), weights, params
        )
        total, _ = jax.lax.scan(add, zeros, constrain(parts, None, "fsdp", None))
        return jax.tree.map(lambda value: value / micro_batches, total)

    def train(state, tokens):
        grads = gradients(state["params"], tokens)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["v"], grads)
        params = jax.tree.map(lambda p, m, v: p - 3e-4 * m / (jnp.sqrt(v) + 1e-8), state["params"], m, v)
        return {"params": params, "m": m, "v": v}

    return jax.jit(train, donate_argnums=0), (state, tokens), BATCH * SEQUENCE
