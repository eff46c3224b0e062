"""Runs a JAX step on processors as one of several processes, and times it: python dpro_search_xla_rank.py REQUEST FOLDER

REQUEST is a JSON file: script, function and mesh as in `dpro_search_capture_jax.py`, steps to time after warmup, profiled steps,
and exchanges to time: [kind, elements of float32 on a device, devices of a group] ("nothing" computes a little). The environment
has DPRO_SEARCH_RANK, DPRO_SEARCH_RANKS and DPRO_SEARCH_MEETING, host and port of rank 0. Each rank writes ``rank{r}.json`` into
FOLDER: losses, the first number that each step returns; steps_ns [begin, end], by the clock that all ranks on this machine share;
profiled_ns, the same of the profiled steps, and their events [instruction, begin, end]; exchanges_ns, for each one its calls
[begin, end]. Needs JAX; Python 3.10 and later.
"""

import contextlib
import glob
import json
import os
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import dpro_search_capture_jax as capture

_CALLS, _WARM_CALLS = 5, 2
_CLOCK = "dpro-search clock "


def main():
    with open(sys.argv[1]) as file:
        request = json.load(file)
    rank, ranks = int(os.environ["DPRO_SEARCH_RANK"]), int(os.environ["DPRO_SEARCH_RANKS"])
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = (flags + " --xla_force_host_platform_device_count=1 " + capture.PROCESSOR_FLAGS).strip()
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["DPRO_SEARCH_MEETING"], ranks, rank)
    mesh = capture.mesh_of(request["mesh"], jax.devices())
    made = capture.step_of(request, mesh)
    run = _TimedStep(made.step, made.arguments, made.options)
    capture.say("rank %d runs" % rank)
    for _ in range(request["warmup"]):
        run()
    answer = {"steps_ns": [run() for _ in range(request["steps"])], "losses": [float(loss) for loss in run.losses]}
    if request["profiled"]:
        answer["profiled_ns"], answer["events"] = _profiled(run, request["profiled"])
    answer["exchanges_ns"] = [_exchanged(mesh, *each) for each in request["exchanges"]]
    with open(os.path.join(sys.argv[2], "rank%d.json" % rank), "w") as file:
        json.dump(answer, file)
    jax.distributed.shutdown()


class _TimedStep:
    """The compiled step with its arguments; what it returns first takes the place of the first arguments where it is like them."""

    def __init__(self, step, arguments, options):
        import jax

        if not hasattr(step, "lower"):
            step = jax.jit(step)
        lowered = step.lower(*arguments)
        self._compiled = lowered.compile(compiler_options=options)
        donated = any(leaf.donated for leaf in jax.tree.leaves(lowered.args_info))
        self._arguments = [jax.tree.map(_array, each) for each in arguments]
        self._again, self.losses = None, []
        outputs = lowered.out_info
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        self._whole = first is outputs
        self._follows = _alike(first, arguments[0])
        if donated and not self._follows:
            self._again = jax.jit(lambda each: jax.tree.map(lambda leaf: leaf + 0, each))

    def __call__(self):
        """Run it once; returns when it began and ended, in ns."""
        import jax

        arguments = self._again(self._arguments) if self._again else self._arguments
        jax.block_until_ready(arguments)
        begin = time.monotonic_ns()
        outputs = jax.block_until_ready(self._compiled(*arguments))
        end = time.monotonic_ns()
        self.losses += [leaf for leaf in jax.tree.leaves(outputs) if leaf.ndim == 0 and "float" in str(leaf.dtype)][:1]
        if self._follows:
            self._arguments[0] = outputs if self._whole else outputs[0]
        return begin, end


def _alike(outputs, argument):
    import jax

    if jax.tree.structure(outputs) != jax.tree.structure(argument):
        return False
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(argument))
    return all((each.shape, each.dtype) == (other.shape, other.dtype) for each, other in pairs)


def _array(leaf):
    """An array in place of a `jax.ShapeDtypeStruct`: small numbers that are the same under every mesh."""
    import jax
    import numpy as np

    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if leaf.sharding is None:
        raise capture.RefusedError("an argument of the step has no sharding: give jax.ShapeDtypeStruct one, or an array")

    def part(index):
        place = np.zeros((1,) * len(leaf.shape))
        for axis, (one, size) in enumerate(zip(index, leaf.shape)):
            along = np.arange(*one.indices(size)).reshape([-1 if each == axis else 1 for each in range(len(leaf.shape))])
            place = place * size + along
        if np.issubdtype(leaf.dtype, np.integer) or leaf.dtype == bool:
            return (place % 2).astype(leaf.dtype)
        return ((np.sin(place * 12.9898) * 43758.5453 % 1 - 0.5) * 0.1).astype(leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _profiled(run, steps):
    """When the steps began and ended, and their instructions in the order in which they began: name, begin and end."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            spans = []
            for _ in range(steps):
                with jax.profiler.TraceAnnotation(_CLOCK + str(time.monotonic_ns())):
                    pass
                spans.append(run())
        (path,) = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
    events = [event for plane in profile.planes for line in plane.lines for event in line.events]
    offset_ns = min(int(event.name[len(_CLOCK) :]) - event.start_ns for event in events if event.name.startswith(_CLOCK))
    named = [(dict(event.stats).get("hlo_op"), event) for event in events if event.duration_ns]
    started = [[name, round(each.start_ns + offset_ns), round(each.end_ns + offset_ns)] for name, each in named if name is not None]
    return spans, sorted(started, key=lambda each: each[1])


def _exchanged(mesh, kind, elements, size):
    """Calls of a collective among groups of `size` devices that follow each other."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = mesh.devices.flatten()
    groups = Mesh(devices.reshape(-1, size), ("across", "among"))
    everywhere = PartitionSpec(("across", "among"))
    calls = {
        "nothing": lambda each: each + 1,
        "all-reduce": lambda each: jax.lax.psum(each, "among"),
        "all-gather": lambda each: jax.lax.all_gather(each, "among", tiled=True),
        "reduce-scatter": lambda each: jax.lax.psum_scatter(each, "among", tiled=True),
        "all-to-all": lambda each: jax.lax.all_to_all(each, "among", 0, 0, tiled=True),
        "collective-permute": lambda each: jax.lax.ppermute(each, "among", [(one, (one + 1) % size) for one in range(size)]),
    }
    call = jax.jit(jax.shard_map(calls[kind], mesh=groups, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    array = jax.make_array_from_callback(
        (elements * devices.size,), NamedSharding(groups, everywhere), lambda index: np.ones(elements, np.float32)
    )
    compiled = call.lower(array).compile()
    spans = []
    for number in range(_WARM_CALLS + _CALLS):
        begin = time.monotonic_ns()
        jax.block_until_ready(compiled(array))
        if number >= _WARM_CALLS:
            spans.append((begin, time.monotonic_ns()))
    return spans


if __name__ == "__main__":
    try:
        main()
    except capture.RefusedError as error:
        with contextlib.suppress(BrokenPipeError):
            print(error, file=sys.stderr)
        sys.exit(1)
