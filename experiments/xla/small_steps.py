"""Three training steps that are small enough for processors: a multilayer perceptron, a transformer, and a convolutional network.

Their meshes have the axes data, fsdp and tp; the step is the same under each. `python -m experiments.xla.processors` runs them.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BOTH = ("data", "fsdp")
RATE = 0.01


def perceptron(mesh):
    """Six products of 768 x 768, 512 samples."""
    width, layers, batch = 768, 6, 512

    def loss(weights, inputs):
        x = inputs
        for number in range(0, layers, 2):
            x = jnp.tanh(x @ weights[number])  # columns on tp
            x = jnp.tanh(x @ weights[number + 1])  # rows on tp
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(BOTH, None)))
        return jnp.mean(x**2)

    weights = [_array(mesh, (width, width), ("fsdp", "tp") if number % 2 == 0 else ("tp", "fsdp")) for number in range(layers)]
    return _trained(loss), (weights, _array(mesh, (batch, width), (BOTH, None))), batch


def transformer(mesh):
    """Two blocks of width 256 with 8 heads in a loop, 16 sequences of 64 tokens, a vocabulary of 2,048."""
    width, layers, heads, vocabulary, batch, sequence = 256, 2, 8, 2048, 16, 64
    blocks = {
        "qkv": _array(mesh, (layers, width, 3, width), (None, "fsdp", None, "tp")),
        "out": _array(mesh, (layers, width, width), (None, "tp", "fsdp")),
        "up": _array(mesh, (layers, width, 4 * width), (None, "fsdp", "tp")),
        "down": _array(mesh, (layers, 4 * width, width), (None, "tp", "fsdp")),
    }
    weights = {
        "embedding": _array(mesh, (vocabulary, width), ("tp", "fsdp")),
        "head": _array(mesh, (width, vocabulary), ("fsdp", "tp")),
        "blocks": blocks,
    }

    def placed(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def block(x, w):
        shape = (*x.shape[:2], heads, width // heads)
        q, k, v = (placed((x @ w["qkv"][:, part]).reshape(shape), BOTH, None, "tp", None) for part in range(3))
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(width // heads)
        mixed = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
        x = placed(x + mixed @ w["out"], BOTH, None, None)
        return placed(x + jax.nn.gelu(x @ w["up"]) @ w["down"], BOTH, None, None), None

    def loss(weights, tokens):
        x = placed(weights["embedding"][tokens], BOTH, None, None)
        x, _ = jax.lax.scan(block, x, weights["blocks"])
        logits = placed(x @ weights["head"], BOTH, None, "tp")
        picked = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    tokens = _array(mesh, (batch, sequence), (BOTH, None), jnp.int32)
    return _trained(loss), (weights, tokens), batch * sequence


def convolutions(mesh):
    """Four convolutions of 64 channels and a product, 32 images of 24 x 24 pixels."""
    channels, layers, classes, batch, side = 64, 4, 512, 32, 24

    def loss(weights, images):
        x = images
        for kernel in weights["kernels"]:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        logits = x.mean((1, 2)) @ weights["head"]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

    kernels = [_array(mesh, (3, 3, channels, channels), (None, None, "fsdp", "tp")) for _ in range(layers)]
    weights = {"kernels": kernels, "head": _array(mesh, (channels, classes), ("fsdp", "tp"))}
    return _trained(loss), (weights, _array(mesh, (batch, side, side, channels), (BOTH, None, None, None))), batch


def _array(mesh, shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def _trained(loss):
    """The jitted step of plain gradient descent; new weights have the shardings of the old ones."""

    def step(weights, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients), value

    return jax.jit(step, donate_argnums=0)
