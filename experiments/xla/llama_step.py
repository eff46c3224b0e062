"""A Llama-like step for meshes with the axes data, fsdp and tp: 256 sequences of 2,048 tokens, whatever the mesh.

`dpro-search capture --jax` runs it in the environment of `scripts/make_env.sh jax`; `python -m experiments.xla.meshes` compiles all
meshes.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HIDDEN, LAYERS, VOCAB, SEQUENCE, BATCH = 2048, 8, 32000, 2048, 256
FFN, HEADS = 5632, 16


def step(mesh):
    def weight(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    both = ("data", "fsdp")
    blocks = {
        "norm1": weight((None, None), LAYERS, HIDDEN),
        "norm2": weight((None, None), LAYERS, HIDDEN),
        "qkv": weight((None, "fsdp", None, "tp"), LAYERS, HIDDEN, 3, HIDDEN),
        "out": weight((None, "tp", "fsdp"), LAYERS, HIDDEN, HIDDEN),
        "gate": weight((None, "fsdp", "tp"), LAYERS, HIDDEN, FFN),
        "up": weight((None, "fsdp", "tp"), LAYERS, HIDDEN, FFN),
        "down": weight((None, "tp", "fsdp"), LAYERS, FFN, HIDDEN),
    }
    params = {"embedding": weight(("tp", "fsdp"), VOCAB, HIDDEN), "head": weight(("fsdp", "tp"), HIDDEN, VOCAB), "blocks": blocks}
    state = {"params": params, "m": params, "v": params}
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32, sharding=NamedSharding(mesh, P(both, None)))

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def norm(x, scale):
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5) * scale).astype(jnp.bfloat16)

    def block(x, w):
        w = {name: value.astype(jnp.bfloat16) for name, value in w.items()}
        h = norm(x, w["norm1"])
        q, k, v = (constrain((h @ w["qkv"][:, part]).reshape(*h.shape[:2], HEADS, -1), both, None, "tp", None) for part in range(3))
        scores = jnp.einsum("bsnd,btnd->bnst", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool)), scores, -1e30)
        mixed = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1).astype(jnp.bfloat16), v).reshape(h.shape)
        x = constrain(x + mixed @ w["out"], both, None, None)
        h = norm(x, w["norm2"])
        h = constrain(jax.nn.silu(h @ w["gate"]) * (h @ w["up"]), both, None, "tp")
        return constrain(x + h @ w["down"], both, None, None), None

    def loss(params, tokens):
        x = constrain(params["embedding"].astype(jnp.bfloat16)[tokens], both, None, None)
        x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
        logits = constrain((x @ params["head"].astype(jnp.bfloat16)).astype(jnp.float32), both, None, "tp")
        picked = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def train(state, tokens):
        value, grads = jax.value_and_grad(loss)(state["params"], tokens)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["v"], grads)
        params = jax.tree.map(lambda p, m, v: p - 3e-4 * m / (jnp.sqrt(v) + 1e-8), state["params"], m, v)
        return {"params": params, "m": m, "v": v}, value

    return jax.jit(train, donate_argnums=0), (state, tokens), BATCH * SEQUENCE
