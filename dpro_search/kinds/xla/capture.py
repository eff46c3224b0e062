"""`capture_program`: compiles a JAX step for devices that are not here, and keeps the program in a folder that every verb reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dpro_search.cluster import Cluster, Device, parse_cluster
from dpro_search.collect._files import require_new, written_folder
from dpro_search.collect.capture.worker import run_worker
from dpro_search.collect.launch.ranks import environment_python
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.kinds.xla.program import FACTS_FILE, TEXT_FILE, ProgramFacts, XlaProgram, read_program
from dpro_search.kinds.xla.times import TIMES_FILE, require_startable, timed
from dpro_search.runtime import CAPTURE

TIME_LIMIT_S = 1800.0
_WORKER = CAPTURE / "dpro_search_capture_jax.py"
_PROCESSORS = re.compile(r"cpu:(\d{1,4})")
# Architectures by the names of devices: NVIDIA, CUDA C++ programming guide, "compute capabilities".
_CAPABILITIES = (
    (r"\bG?B(100|200)\b", (10, 0)),
    (r"\bG?B300\b", (10, 3)),
    (r"RTX PRO|RTX 50", (12, 0)),
    (r"\bG?H(20|100|200|800)\b", (9, 0)),
    (r"\bL(4|20|40|40S)\b|RTX 40|RTX 6000 Ada", (8, 9)),
    (r"\bA(10|10G|40)\b|RTX A|RTX 30", (8, 6)),
    (r"\bA(30|100|800)\b", (8, 0)),
    (r"\bV100\b", (7, 0)),
)
# XLA's GpuTargetConfigProto (xla/stream_executor/device_description.proto). Limits of threads and registers are those of every
# architecture since Volta; XLA needs them for the shapes of its kernels' blocks.
_GPU_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {memory_rate} l2_cache_size: {l2} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
_SHARED_BYTES = {7: 98304, 8: 167936, 9: 233472, 10: 233472, 12: 102400}  # of a multiprocessor, by the major number


@dataclass(frozen=True, kw_only=True)
class ProgramRequest:
    """A step to compile.

    Attributes
    ----------
    script, function
        A script and its function of a `jax.sharding.Mesh`, which returns the jitted step and its arguments, and may return the
        tokens of a step behind them.
    on
        The devices: a topology or a cluster of GPUs as ``--cluster`` takes them, or "cpu:8".
    mesh
        Devices along each axis; empty: one axis "data".
    chosen
        Values of the script's ``CHOICES`` by name, as texts; those that are left out are the first.
    python
        An interpreter with JAX and the devices' compiler.
    timed
        Whether the step also runs here, on processes for the devices of a cluster of CPU cores, and is timed.
    """

    script: Path
    function: str
    on: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    python: str
    time_limit_s: float = TIME_LIMIT_S
    timed: bool = False


class _CaptureAnswer(msgspec.Struct):
    error: str


def program_request(
    model: str, *, on: str | None, mesh: str, choose: str = "", python: str | None, time_limit_s: float, timed: bool = False
) -> ProgramRequest:
    """A request as people write it: ``train.py:step``, ``v6e:16x16``, ``fsdp=64,tp=4``, ``remat=none,micro_batches=2``.

    Raises
    ------
    InputError
        One of them is not of this form.
    MissingCapabilityError
        No interpreter is named, and that of ``scripts/make_env.sh jax`` was not built.
    """
    script, _, function = model.rpartition(":")
    if not script or not function.isidentifier():
        raise InputError(f"{model}: give a script and a function of a Mesh, like train.py:step")
    if not Path(script).is_file():
        raise InputError(f"{script}: no such script")
    if on is None:
        raise InputError(
            "--jax compiles for devices that need not be here: name them, like --on v6e:16x16, --on 4xhgx-h100 or --on cpu:8"
        )
    usual = environment_python("jax")
    if python is None and not usual.is_file():
        raise MissingCapabilityError(
            f"{usual}: no such interpreter; build JAX's with 'scripts/make_env.sh jax+tpu' or name one by --python"
        )
    return ProgramRequest(
        script=Path(script),
        function=function,
        on=on,
        mesh=parse_mesh(mesh),
        chosen=parse_chosen(choose),
        python=python or str(usual),
        time_limit_s=time_limit_s,
        timed=timed,
    )


def capture_program(request: ProgramRequest, out: Path, say: Callable[[str], None] = lambda what: None) -> XlaProgram:
    """Compile a step, and write the program into the new folder `out`.

    Parameters
    ----------
    say
        Called with what is done.

    Raises
    ------
    InputError
        `out` exists, the devices are not known, or the step cannot be compiled: the compiler's reason, and the script's line.
    MissingCapabilityError
        The interpreter has no JAX, or not the devices' compiler.
    JobError
        The process failed otherwise, or took too long.
    """
    require_new(out)
    if request.timed:
        require_startable(parse_cluster(request.on))
    values = {
        **_target(request.on),
        "mesh": dict(request.mesh),
        "chosen": dict(request.chosen),
        "script": str(request.script.resolve()),
        "function": request.function,
    }
    with written_folder(out) as folder:
        values["program"] = str(folder / TEXT_FILE)
        written = run_worker(request.python, _WORKER, values, folder, timeout_s=request.time_limit_s, needs="JAX", say=say)
        if b'"error"' in written:
            error = msgspec.json.decode(written, type=_CaptureAnswer).error
            missing = "cannot import jax" in error or "make_env.sh" in error
            raise (MissingCapabilityError if missing else InputError)(error)
        facts = msgspec.json.decode(written, type=ProgramFacts)
        facts = msgspec.structs.replace(facts, script_path=str(request.script.resolve()), python=request.python)
        (folder / FACTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
        if request.timed:
            say("running it here, with its collectives")
            times = timed(
                request.script.resolve(), request.function, facts.mesh, facts.chosen, parse_cluster(request.on), request.python
            )
            (folder / TIMES_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(times), indent=1))
        for name in ("request.json", "answer.json"):
            (folder / name).unlink()
    program = read_program(out)
    assert program is not None, "just written"
    return program


def _target(on: str) -> dict[str, object]:
    """The platform and topology of devices, as the worker takes them."""
    processors = _PROCESSORS.fullmatch(on.strip())
    if processors is not None:
        return {"platform": "cpu", "topology": processors[1], "slices": 1, "gpu": None, "name": ""}
    cluster = parse_cluster(on)
    device = cluster.groups[0].host.device
    if cluster.torus is not None:
        name = cluster.name.rpartition(" x ")[2]
        return {"platform": "tpu", "topology": name, "slices": cluster.torus.slices, "gpu": None, "name": on}
    if device.kind == "cpu":
        return {"platform": "cpu", "topology": str(cluster.ranks), "slices": 1, "gpu": None, "name": on}
    if device.kind != "gpu" or device.vendor != "NVIDIA" or cluster.ranks_per_host is None:
        raise InputError(
            f"--on {on}: XLA compiles without the device for slices of TPUs (v6e:16x16), NVIDIA GPUs (4xhgx-h100) and processors "
            "(cpu:8, 4xtestbed@1gbit)"
        )
    return {
        "platform": "cuda",
        "topology": f"1x{cluster.hosts}x{cluster.ranks_per_host}",
        "slices": 1,
        "gpu": _gpu_target(cluster, device),
        "name": on,
    }


def _gpu_target(cluster: Cluster, device: Device) -> str:
    """The text of XLA's description of a GPU."""
    capability = next((each for pattern, each in _CAPABILITIES if re.search(pattern, device.name)), None)
    known = {
        "cores": device.cores,
        "memory": device.memory_bytes,
        "memory_rate": device.memory_bytes_per_s,
        "clock": device.clock_hz,
    }
    missing = [name for name, value in known.items() if value is None]
    if capability is None or missing:
        what = "its compute capability" if capability is None else f"{' and '.join(missing)} of its file"
        raise InputError(f"{cluster.name}: XLA needs {what} to compile for {device.name}")
    major, minor = capability
    shared = _SHARED_BYTES[major]
    return _GPU_TARGET.format(
        shared=shared,
        optin=shared - 1024,
        cores=device.cores,
        memory_rate=round(device.memory_bytes_per_s or 0),
        l2=round(device.l2_cache_bytes or 0),
        clock=(device.clock_hz or 0) / 1e9,
        memory=round(device.memory_bytes or 0),
        major=major,
        minor=minor,
        name=device.name,
    )


def parse_mesh(text: str) -> dict[str, int]:
    """Devices along each axis, from a text like "fsdp=64,tp=4" or "fsdp=64+tp=4"; raises `InputError` for another."""
    mesh: dict[str, int] = {}
    for axis, size in _pairs(text, "--mesh", "axes and their devices, like fsdp=64,tp=4"):
        if not size.isdigit() or not int(size):
            raise InputError(f"--mesh {axis}={size}: write axes and their devices, like fsdp=64,tp=4")
        mesh[axis] = int(size)
    return mesh


def parse_chosen(text: str) -> dict[str, str]:
    """Values of choices, from a text like "remat=none,micro_batches=2"; `parse_mesh` has the separators and errors."""
    return dict(_pairs(text, "choices", "names and values, like remat=none,micro_batches=2"))


def _pairs(text: str, option: str, form: str) -> list[tuple[str, str]]:
    """Names and texts of a list; raises `InputError` for another text, or a name that is given twice."""
    pairs: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in re.split(r"[,+]", text))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not value:
            raise InputError(f"{option} {part}: write {form}")
        if name in pairs:
            raise InputError(f"{option} {part}: {name} is given twice")
        pairs[name] = value
    return list(pairs.items())
