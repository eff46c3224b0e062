"""Compiles a JAX step ahead of time for devices that are not here: python dpro_search_capture_jax.py REQUEST ANSWER

REQUEST is a JSON file: script and function, which gets a `jax.sharding.Mesh` and returns the jitted step and its arguments (arrays
or `jax.ShapeDtypeStruct` with shardings), and optionally the tokens of a step; chosen, values by the names of the script's
`CHOICES`, which the function gets by keyword (those of "flags" are the compiler's); platform ("tpu", "cuda", "cpu"); topology
(TPUs: as libtpu names it; GPUs: slices x hosts x devices; processors: their number); slices; gpu (text of XLA's
GpuTargetConfigProto, or null); mesh {axis: devices}; program, the file to write. ANSWER is written: {"error": ...} or the facts of
the program. Progress is lines on stderr that begin with "capture: ". Needs JAX and the platform's compiler; Python 3.10 and later.
"""

import contextlib
import ctypes
import gzip
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
import time
import traceback
import types
from importlib import metadata

# Autotuning needs the device; without it XLA's own estimates choose, and Triton's products, which it cannot estimate, are left out.
GPU_FLAGS = (
    "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_enable_analytical_latency_estimator=true"
)
# A process of a real run computes with one thread, on its core.
PROCESSOR_FLAGS = "--xla_cpu_multi_thread_eigen=false"
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt")
_HELD = "RESOURCE_EXHAUSTED"


def main():
    _end_with_parent()
    with open(sys.argv[1]) as file:
        request = json.load(file)
    _environment(request)
    try:
        answer = _captured(request)
    except RefusedError as error:
        answer = {"error": str(error)}
    except Exception as error:
        answer = {"error": _one_line(error, request["script"])}
    with open(sys.argv[2], "w") as file:
        json.dump(answer, file)


class RefusedError(Exception):
    """A request that cannot be followed; its text is for the person who made it."""


def _environment(request):
    """Set what JAX and the compilers read when they are imported."""
    os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # nothing runs on a TPU, so that compilations do not disturb each other
    flags = os.environ.get("XLA_FLAGS", "")
    if request["platform"] == "cuda":
        flags = "%s %s" % (GPU_FLAGS, flags)  # what the user set comes last, and counts
    elif request["platform"] == "cpu":
        flags = "%s --xla_force_host_platform_device_count=%s %s" % (flags, request["topology"], PROCESSOR_FLAGS)
    os.environ["XLA_FLAGS"] = flags.strip()


def _captured(request):
    say("importing JAX")
    try:
        import jax
    except ImportError as error:
        raise RefusedError("%s cannot import jax: %s" % (sys.executable, error)) from None
    devices = _devices(request)
    mesh = mesh_of(request["mesh"], devices)
    say("reading %s" % os.path.basename(request["script"]))
    made = step_of(request, mesh)
    step = made.step
    started = time.time()
    say("tracing for %d devices" % len(devices))
    if not hasattr(step, "trace"):
        step = jax.jit(step)
    lowered = step.trace(*made.arguments).lower(lowering_platforms=(request["platform"],))
    say("compiling for %s; large programs take minutes" % request["name"])
    compiled = lowered.compile(compiler_options=made.options)
    seconds = time.time() - started
    say("writing the program")
    with gzip.GzipFile(request["program"], "wb", 6, mtime=0) as file:
        file.write(compiled.as_text().encode())
    ordered = list(mesh.devices.flatten())
    place = {id(device): number for number, device in enumerate(devices)}
    return {
        "platform": request["platform"],
        "cluster": request["name"],
        "mesh": dict(mesh.shape),
        "device_ids": [place[id(device)] for device in ordered],
        "coordinates": [[*device.coords, 0, 0, 0][:3] for device in devices if hasattr(device, "coords")],
        "slices": [getattr(device, "slice_index", 0) or 0 for device in devices if hasattr(device, "coords")],
        "tokens": made.tokens,
        "choices": made.choices,
        "chosen": made.chosen,
        "memory": _memory(compiled),
        "compile_s": round(seconds, 2),
        "versions": {name: metadata.version(name) for name in PACKAGES if _installed(name)},
        "flags": os.environ["XLA_FLAGS"],
        "script": "%s:%s" % (os.path.basename(request["script"]), request["function"]),
    }


def _devices(request):
    """The devices of the topology, in its order."""
    import jax
    from jax.experimental import topologies

    platform, topology = request["platform"], request["topology"]
    if platform == "cpu":
        return jax.devices()
    if platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise RefusedError(
                "%s has no libtpu, the compiler for TPUs: build it with 'scripts/make_env.sh jax+tpu'" % sys.executable
            )
        more = {"num_slices": request["slices"]} if request["slices"] > 1 else {}
        if topology.startswith("v4:"):  # libtpu's default lists both cores of a chip; jobs of TPU v4 run them as one device
            more["chip_config_name"] = "megacore"
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=topology, **more).devices
        except Exception as error:
            raise RefusedError("libtpu knows no topology %s: %s" % (topology, _one_line(error, ""))) from None
    if importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise RefusedError("%s has no compiler for NVIDIA GPUs: build it with 'scripts/make_env.sh jax+cuda'" % sys.executable)
    import jax_plugins.xla_cuda12

    with contextlib.suppress(Exception):  # JAX found the plugin by itself
        jax_plugins.xla_cuda12.initialize()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="gpu", target_config=request["gpu"], topology=topology
    ).devices


def mesh_of(axes, devices):
    """The mesh, laid out as JAX's own helper does where it can: neighbours in the mesh are neighbours on the torus."""
    import numpy as np
    from jax.experimental import mesh_utils
    from jax.sharding import Mesh

    axes = axes or {"data": len(devices)}
    shape = tuple(axes.values())
    if int(np.prod(shape)) != len(devices):
        raise RefusedError("--mesh %s is %d devices, and there are %d" % (axes, np.prod(shape), len(devices)))
    try:
        placed = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    except Exception:  # shapes that the helper does not know
        placed = np.array(devices).reshape(shape)
    return Mesh(placed, tuple(axes))


def step_of(request, mesh):
    """The step and its arguments, tokens of a step or None, the script's choices, and the values that the request has of them."""
    module, function = _function_of(request)
    choices = _choices(module, request)
    chosen = _chosen(choices, request)
    place = "%s:%s" % (os.path.basename(request["script"]), request["function"])
    keywords = {name: choices[name][text] for name, text in chosen.items() if name != "flags"}
    try:
        inspect.signature(function).bind(mesh, **keywords)
    except TypeError as error:
        raise RefusedError("%s: %s; it gets the mesh, and each name of CHOICES but flags by keyword" % (place, error)) from None
    made = function(mesh, **keywords)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]) or not isinstance(made[1], (tuple, list)):
        raise RefusedError(
            "%s must return the jitted step and a tuple of its arguments, and may return the tokens of a step behind them" % place
        )
    return types.SimpleNamespace(
        step=made[0],
        arguments=made[1],
        tokens=made[2] if len(made) == 3 else None,
        choices={name: {text: _plain(value) for text, value in values.items()} for name, values in choices.items()},
        chosen=chosen,
        options=choices["flags"][chosen["flags"]] if "flags" in choices else None,
    )


def _function_of(request):
    """The script's module, and the function in it."""
    script, name = request["script"], request["function"]
    sys.path.insert(0, os.path.dirname(script))
    spec = importlib.util.spec_from_file_location("captured_script", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["captured_script"] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        raise RefusedError("%s has no function '%s'" % (script, name))
    return module, function


def _choices(module, request):
    """The script's `CHOICES`: the values of each name by their texts. It is empty for a script without them."""
    declared, script = getattr(module, "CHOICES", {}), os.path.basename(request["script"])
    if not isinstance(declared, dict) or not all(isinstance(values, (list, tuple, dict)) for values in declared.values()):
        raise RefusedError(
            "%s: CHOICES must be a dictionary whose values are lists, or dictionaries of named values, like "
            '{"remat": ["full", "none"], "flags": {"default": {}}}' % script
        )
    choices = {}
    for name, values in declared.items():
        if not str(name).isidentifier() or name == "mesh":
            raise RefusedError("%s: CHOICES has the name %r; take the name of an argument, but not mesh" % (script, name))
        by_text = {str(text): value for text, value in (values.items() if isinstance(values, dict) else zip(values, values))}
        if not by_text or len(by_text) < len(values) or not all(re.fullmatch(r"[^\s,+=]+", text) for text in by_text):
            raise RefusedError(
                "%s: CHOICES has for %s the values %s; give different ones, as text without spaces and , + =, as numbers, or as a "
                "dictionary of named values" % (script, name, list(by_text))
            )
        if name == "flags" and not all(isinstance(options, dict) for options in by_text.values()):
            raise RefusedError(
                '%s: the flags of CHOICES must be dictionaries of compiler options by name, like {"default": {}, '
                '"hidden": {"xla_gpu_enable_latency_hiding_scheduler": "true"}}' % script
            )
        choices[name] = by_text
    return choices


def _chosen(choices, request):
    """The text of each choice's value: the requested one, or the first."""
    script = os.path.basename(request["script"])
    for name, text in request["chosen"].items():
        if name not in choices:
            declared = "it has " + ", ".join(choices) if choices else "it has none"
            raise RefusedError("%s: CHOICES has no '%s'; %s" % (script, name, declared))
        if text not in choices[name]:
            raise RefusedError("%s: CHOICES has no %s '%s'; it has %s" % (script, name, text, ", ".join(choices[name])))
    return {name: request["chosen"].get(name, next(iter(values))) for name, values in choices.items()}


def _plain(value):
    """A value as JSON has it, or None."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return None


def _memory(compiled):
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    host = ("host_argument_size_in_bytes", "host_output_size_in_bytes", "host_temp_size_in_bytes")
    return {
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporaries_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "peak_live_bytes": getattr(memory, "peak_memory_in_bytes", 0),
        "host_bytes": sum(getattr(memory, name, 0) for name in host) - getattr(memory, "host_alias_size_in_bytes", 0),
    }


def _one_line(error, script):
    """An error in one line, with the line of the user's script where it was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if _HELD in text:
        text = "the program does not fit: %s" % text
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if script and frame.filename == script]
    where = "%s:%d: " % (os.path.basename(script), places[-1].lineno) if places else ""
    kind = "" if isinstance(error, (RuntimeError, ValueError)) or _HELD in text else "%s: " % type(error).__name__
    return where + kind + text[:600]


def _installed(name):
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def say(text):
    print("capture: " + text, file=sys.stderr, flush=True)


def _end_with_parent():
    """End when the process that started this one does: a compilation takes minutes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
