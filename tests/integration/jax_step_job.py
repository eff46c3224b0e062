"""Steps of JAX that tests capture: functions of a mesh that return the jitted step, its arguments, and the tokens of a step."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, ROWS = 3, 256, 512


def step(mesh):
    """A stack of products under `lax.scan`, with weights sharded over fsdp and tp."""

    def shaped(spec, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        "up": shaped((None, "fsdp", "tp"), LAYERS, WIDTH, 4 * WIDTH),
        "down": shaped((None, "tp", "fsdp"), LAYERS, 4 * WIDTH, WIDTH),
    }
    rows = shaped(("fsdp", None), ROWS, WIDTH)

    def loss(weights, x):
        def block(x, w):
            return jax.lax.with_sharding_constraint(
                x + jnp.tanh(x @ w["up"]) @ w["down"], NamedSharding(mesh, P("fsdp", None))
            ), None

        x, _ = jax.lax.scan(block, x, weights)
        return jnp.mean(x * x)

    def train(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return jax.jit(train, donate_argnums=0), (weights, rows), ROWS


def wrong(mesh):
    """A script with an error in it."""
    return jax.jit(lambda x: x @ jnp.zeros((3, 3))), (jax.ShapeDtypeStruct((2, 2), jnp.float32),)


def nothing(mesh):
    """A function that returns something else than a step."""
    return mesh.shape
