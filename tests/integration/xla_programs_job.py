"""Compile small sharded programs with JAX and keep their HLO texts: run with the Python of `scripts/make_env.sh jax+tpu+cuda`.

usage: xla_programs_job.py TARGET FOLDER [PROGRAM ...]

TARGET is "cpu" (eight forced devices), a TPU topology of eight devices ("v5e:2x4", "v6e:2x4", "tpu7x:2x2x1") or "h100:1x1x8". For
each program it writes FOLDER/PROGRAM.TARGET.hlo.gz, and FOLDER/PROGRAM.TARGET.json with what the compiler says of it. What the
collectives of a program have to be follows from the program, and stands in `tests/collect/xla/known.py`.
"""

import gzip
import json
import os
import sys
from importlib import metadata
from pathlib import Path

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
GPU_FLAGS = (
    "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_enable_analytical_latency_estimator=true"
)
LAYERS, WIDTH = 6, 512

target, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
platform = {"cpu": "cpu", "h100": "cuda"}.get(target.partition(":")[0], "tpu")
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
os.environ.update(CUDA_VISIBLE_DEVICES="-1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")  # several processes may compile for TPUs at a time
os.environ["XLA_FLAGS"] = {"cpu": "--xla_force_host_platform_device_count=8", "cuda": GPU_FLAGS}.get(platform, "")

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_hlo_source_file_canonicalization_regex", r".*/(?=tests/)")  # texts name files within the repository


def devices():
    if platform == "cpu":
        return jax.devices()
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target).devices
    import jax_plugins.xla_cuda12

    jax_plugins.xla_cuda12.initialize()
    shape = target.partition(":")[2]
    return topologies.get_topology_desc(platform="cuda", topology_name="h100", target_config=H100, topology=shape).devices


mesh = Mesh(np.array(devices()).reshape(4, 2), ("x", "y"))


def argument(shape, dtype, *spec, memory=None):
    """An argument as the whole array that the devices share."""
    sharding = NamedSharding(mesh, P(*spec), memory_kind=memory) if memory else NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def mapped(function, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def collectives():
    """One collective of each kind, along either axis."""

    def body(a, b, c, d, e):
        a = jax.lax.psum(a, "x")
        b = jax.lax.all_gather(b, "y", axis=0, tiled=True)
        c = jax.lax.psum_scatter(c, "x", scatter_dimension=0, tiled=True)
        d = jax.lax.ppermute(d, "x", [(0, 1), (1, 2), (2, 3), (3, 0)])
        e = jax.lax.all_to_all(e, "y", split_axis=0, concat_axis=1, tiled=True)
        return a, b, c, d, e

    specs = (P("x", "y"), P(("x", "y"), None), P("x", "y"), P("x", "y"), P("x", "y"))
    results = (P(None, "y"), P("x", None), P("x", "y"), P("x", "y"), P("x", "y"))
    arguments = (
        argument((4 * 128, 2 * 256), jnp.float32, "x", "y"),
        argument((8 * 64, 512), jnp.bfloat16, ("x", "y"), None),
        argument((4 * 256, 2 * 512), jnp.float32, "x", "y"),
        argument((4 * 128, 2 * 384), jnp.bfloat16, "x", "y"),
        argument((4 * 64, 2 * 256), jnp.float32, "x", "y"),
    )
    return mapped(body, specs, results), arguments


def scan():
    """A loop over layers, each with an all-gather of its weights, and its gradient."""

    def layer(h, w):
        whole = jax.lax.all_gather(w, "x", axis=0, tiled=True)
        return jnp.tanh(jnp.dot(h, whole, precision="highest")), None  # in another precision TPUs gather the weights in bf16

    def loss(weights, h):
        return jnp.sum(jax.lax.scan(layer, h, weights)[0])

    def step(weights, h):
        value, gradient = jax.value_and_grad(loss)(weights, h)
        return jax.lax.psum(value, ("x", "y")), jax.lax.psum(gradient, "y")

    weights = argument((LAYERS, WIDTH, WIDTH), jnp.float32, None, "x", None)
    inputs = argument((8 * 256, WIDTH), jnp.float32, ("x", "y"), None)
    return mapped(step, (P(None, "x", None), P(("x", "y"), None)), (P(), P(None, "x", None))), (weights, inputs)


def prefetch():
    """Layers whose weights can be gathered while the layer before computes."""

    def layers(h, *weights):
        for w in weights:
            h = jnp.tanh(h @ jax.lax.all_gather(w, "x", axis=0, tiled=True))
        return jax.lax.psum(jnp.sum(h.astype(jnp.float32)), ("x", "y")), h

    weight = argument((4096, 4096), jnp.bfloat16, "x")
    specs = (P(("x", "y")), P("x"), P("x"), P("x"), P("x"))
    return mapped(layers, specs, (P(), P(("x", "y")))), (argument((8 * 4096, 4096), jnp.bfloat16, ("x", "y")), *[weight] * 4)


def branches():
    """Two branches, of which the data choose one."""

    def choose(x, w):
        return jax.lax.cond(jnp.sum(x) > 0, lambda x: (x @ w) @ w, jnp.sin, x)

    return choose, (argument((512, 256), jnp.float32, ("x", "y")), argument((256, 256), jnp.float32))


def convolution():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return convolve, (argument((32, 32, 32, 16), jnp.float32, "x"), argument((3, 3, 16, 64), jnp.float32))


def offload():
    """Weights that come from the host's memory, and a result that goes there."""

    def step(w, h):
        on_device = jax.device_put(w, jax.memory.Space.Device)
        y = jnp.tanh(h @ on_device) @ on_device
        return y, jax.device_put(y * 2, jax.memory.Space.Host)

    weights = argument((1024, 1024), jnp.bfloat16, memory="pinned_host")
    return step, (weights, argument((8 * 256, 1024), jnp.bfloat16, ("x", "y")))


def offloaded_scan():
    """Activations of a loop that are kept in the host's memory for the backward pass."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
    )

    def layer(h, w):
        return jnp.tanh(checkpoint_name(h @ w, "h")), None

    def loss(weights, h):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), h, weights)[0].astype(jnp.float32))

    arguments = (argument((LAYERS, WIDTH, WIDTH), jnp.bfloat16), argument((8 * 256, WIDTH), jnp.bfloat16, ("x", "y")))
    return jax.grad(loss), arguments


def ragged():
    """An all-to-all whose ranks exchange different amounts, as in a mixture of experts."""

    def exchange(rows, output, offsets, sizes, output_offsets, receive_sizes):
        numbers = (offsets[0], sizes[0], output_offsets[0], receive_sizes[0])
        return jax.lax.ragged_all_to_all(rows, output, *numbers, axis_name="x")

    rows = argument((4 * 128, 256), jnp.float32, "x")
    return mapped(exchange, (P("x"),) * 6, P("x")), (rows, rows, *[argument((4, 4), jnp.int32, "x")] * 4)


def sharded():
    """Matrix products whose collectives the partitioner chooses, in its own notation of groups."""

    def products(a, b):
        z = jax.lax.with_sharding_constraint(jnp.sin(a @ b), NamedSharding(mesh, P("x", "y")))
        return jax.lax.with_sharding_constraint(jnp.sin(z @ z), NamedSharding(mesh, P(None, "y")))

    return products, (argument((512, 512), jnp.float32, "x", "y"), argument((512, 512), jnp.float32, "y", None))


def sorting():
    def several(x):
        return jnp.sort(x, -1), jnp.argmax(x, -1), jnp.cumsum(x, -1)

    return several, (argument((512, 256), jnp.float32, ("x", "y")),)


def kernel():
    """A Pallas kernel whose author says how much it computes (TPUs)."""

    def multiply(a, b, result):
        result[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32).astype(result.dtype)

    def call(a, b):
        return pallas.pallas_call(
            multiply,
            out_shape=jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),
            grid=(4,),
            in_specs=[pallas.BlockSpec((128, 512), lambda i: (i, 0)), pallas.BlockSpec((512, 512), lambda i: (0, 0))],
            out_specs=pallas.BlockSpec((128, 512), lambda i: (i, 0)),
            cost_estimate=pallas.CostEstimate(flops=2 * 512**3, transcendentals=0, bytes_accessed=3 * 512 * 512 * 2),
        )(a, b)

    arguments = (argument((2048, 512), jnp.bfloat16, "x"), argument((512, 512), jnp.bfloat16))
    return mapped(call, (P("x"), P()), P("x")), arguments


PROGRAMS = (collectives, scan, prefetch, branches, convolution, offload, offloaded_scan, ragged, sharded, sorting, kernel)
NOT_ON = {"ragged": ("cpu",), "kernel": ("cpu", "cuda"), "offload": ("cpu",), "offloaded_scan": ("cpu", "cuda")}


def write(program):
    function, arguments = program()
    donated = (0,) if program is scan else ()
    compiled = jax.jit(function, donate_argnums=donated).trace(*arguments).lower(lowering_platforms=(platform,)).compile()
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    facts = {
        "target": target,
        "device_kind": mesh.devices.flat[0].device_kind,
        "memory": {key: getattr(memory, key) for key in sorted(dir(memory)) if key.endswith("_in_bytes")},
        "costs": {key: costs[key] for key in ("flops", "transcendentals", "bytes accessed") if key in costs},
        "versions": {name: version for name in ("jax", "libtpu", "jax-cuda12-plugin") if (version := version_of(name))},
    }
    name = f"{program.__name__}.{target.replace(':', '_')}"
    (folder / f"{name}.hlo.gz").write_bytes(gzip.compress(compiled.as_text().encode(), 9, mtime=0))
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def version_of(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


folder.mkdir(parents=True, exist_ok=True)
for program in PROGRAMS:
    if platform not in NOT_ON.get(program.__name__, ()) and (not names or program.__name__ in names):
        write(program)
