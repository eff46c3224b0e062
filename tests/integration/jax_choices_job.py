"""A step of JAX whose script declares choices: functions of a mesh, with a keyword for each choice but the compiler's flags."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, ROWS = 4, 512, 2048

CHOICES = {
    "remat": ["full", "none"],
    "micro_batches": [1, 2],
    "rules": {
        "weights": {"rows": ("fsdp", "tp"), "width": "fsdp", "inner": "tp"},
        "replicas": {"rows": ("fsdp", "tp"), "width": None, "inner": None},
    },
    "flags": {
        "default": {},
        "in-order": {"xla_gpu_enable_latency_hiding_scheduler": False},
        "unknown": {"xla_no_such_option": True},
    },
}


def step(mesh, remat="full", micro_batches=1, rules=None):
    """A stack of products under `lax.scan`, in micro-batches, with weights sharded by the rules."""

    def sharding(*axes):
        return NamedSharding(mesh, P(*(None if axis is None else rules[axis] for axis in axes)))

    def shaped(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(*axes))

    weights = {
        "up": shaped((LAYERS, WIDTH, 4 * WIDTH), None, "width", "inner"),
        "down": shaped((LAYERS, 4 * WIDTH, WIDTH), None, "inner", "width"),
    }
    rows = shaped((micro_batches, ROWS // micro_batches, WIDTH), None, "rows", None)

    def block(x, w):
        return jax.lax.with_sharding_constraint(x + jnp.tanh(x @ w["up"]) @ w["down"], sharding("rows", None)), None

    body = jax.checkpoint(block) if remat == "full" else block

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    def train(weights, rows):
        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, part)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), rows)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, total)

    return jax.jit(train, donate_argnums=0), (weights, rows), ROWS


def without_keywords(mesh):
    """A function that does not take the choices."""
    return step(mesh, rules=CHOICES["rules"]["weights"])
