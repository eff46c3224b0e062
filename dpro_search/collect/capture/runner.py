"""`capture`: runs the capture of a model in an environment that has PyTorch.

How tensors grow with batch and sequence follows from steps captured at twice each, compared op by op (`with_growth`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dpro_search._version import __version__
from dpro_search.collect._files import scratch_folder
from dpro_search.collect.capture.graph_file import GROWTH, VERSION, CapturedGraph, CapturedStep, CapturedTensor, SavedTensor
from dpro_search.collect.capture.worker import run_worker
from dpro_search.collect.launch.ranks import environment_python
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.runtime import CAPTURE

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("adam", "adamw", "sgd", "none")
ROTATIONS = ("allgather", "alltoall")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "dual-pipe-v")
_SEVERAL = SCHEDULES[2:]  # need two stages on a rank, but for zero-bubble
_WORKER = CAPTURE / "dpro_search_capture.py"
_LETTERS = {powers: letter for letter, powers in GROWTH.items()}
_POWERS = {1.0: 0, 2.0: 1, 4.0: 2}


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """The model to capture.

    Functions are names in the script. `build` returns the model; `inputs` (of batch and sequence) what it reads; `loss` (of its
    output and inputs) a scalar; `tp_plan` (of the model) a plan for `parallelize_module`; `parallelize` (of the model and a
    `DeviceMesh`) applies the whole mesh itself. `batch` is that of a replica; of a pipeline, of one of its `micro_batches` (0:
    twice as many as ranks). `rotate` is how ranks of cp pass keys and values on.
    """

    python: str
    script: Path
    build: str
    inputs: str | None = None
    loss: str | None = None
    tp_plan: str | None = None
    parallelize: str | None = None
    batch: int = 1
    sequence: int | None = None
    precision: str = "bf16"
    optimizer: str = "adamw"
    mesh: Mapping[str, int] = field(default_factory=dict)
    bucket_mib: float = 25.0
    rotate: str = "allgather"
    schedule: str = "1f1b"
    virtual_stages: int = 0
    micro_batches: int = 0
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--precision", self.precision, PRECISIONS),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--rotate", self.rotate, ROTATIONS),
            ("--schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise InputError(f"{name} {value}: use {', '.join(known)}")
        if not self.script.is_file():
            raise InputError(f"{self.script}: no such script")
        if self.parallelize is not None:
            return
        if self.mesh.get("ep", 1) > max(self.mesh.get("dp_shard", 1), self.mesh.get("dp_replicate", 1)):
            raise InputError(f"--mesh ep={self.mesh['ep']}: they are ranks of dp or dp_shard: give as many of these, or more")
        if self.mesh.get("cp", 1) > 1 and (not self.sequence or self.sequence % (2 * self.mesh["cp"])):
            raise InputError(f"--mesh cp={self.mesh['cp']}: give a --sequence that twice as many parts divide")
        if self.mesh.get("pp", 1) > 1:
            _check_pipeline(self.schedule, self.mesh["pp"], self.stages_on_rank, self.step_micro_batches)

    @property
    def stages_on_rank(self) -> int:
        """Stages of a pipeline that each rank has."""
        return self.virtual_stages or (2 if self.schedule in _SEVERAL and self.schedule != "zero-bubble" else 1)

    @property
    def step_micro_batches(self) -> int:
        """Micro-batches of a step: one, without a pipeline."""
        ranks = self.mesh.get("pp", 1)
        return 1 if ranks == 1 else self.micro_batches or 2 * ranks * (1 if self.schedule != "dual-pipe-v" else 2)


def _check_pipeline(schedule: str, ranks: int, stages: int, micro_batches: int) -> None:
    if schedule in ("zero-bubble-v", "dual-pipe-v") and stages != 2:
        raise InputError(f"--schedule {schedule}: has two stages on each rank, not --virtual-stages {stages}")
    if schedule == "interleaved" and stages < 2:
        raise InputError("--schedule interleaved: give --virtual-stages 2 or more")
    if micro_batches < ranks:
        raise InputError(f"--micro-batches {micro_batches}: a pipeline of {ranks} ranks needs as many at least")
    if stages > 1 and micro_batches % ranks:
        raise InputError(f"--micro-batches {micro_batches}: stages that are interleaved need a multiple of {ranks}")


def capture_request(model: str, *, python: str | None, mesh: str, **options: Any) -> CaptureRequest:
    """A request for a model that is named as people name it.

    Parameters
    ----------
    model
        A script and its function that returns the model, like ``train.py:build_model``.
    python
        An interpreter that has PyTorch; None: that of ``scripts/make_env.sh torch``.
    mesh
        Ranks along the axes, like ``dp_shard=8,tp=2``.
    options
        Further fields of `CaptureRequest`.

    Raises
    ------
    InputError
        One of them is not of this form.
    MissingCapabilityError
        No interpreter is named, and that environment was not built.
    """
    script, _, function = model.rpartition(":")
    if not script or not function.isidentifier():
        raise InputError(f"{model}: give a script and a function, like train.py:build_model")
    usual = environment_python("torch")
    if python is None and not usual.is_file():
        raise MissingCapabilityError(
            f"{usual}: no such interpreter; build PyTorch's with 'scripts/make_env.sh torch' or name one by --python"
        )
    return CaptureRequest(python=python or str(usual), script=Path(script), build=function, mesh=parse_mesh(mesh), **options)


class _Answer(msgspec.Struct):
    error: str | None = None
    torch: str = ""
    python: str = ""
    warning: str = ""
    notes: list[str] = []
    steps: dict[str, CapturedStep | None] = {}


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of the axes in a text like ``tp=2,dp_shard=4``, where ``dp`` is ``dp_replicate``; raises `InputError`.

    Axes of one rank are left out.
    """
    mesh: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        axis, _, size = part.partition("=")
        axis = {"dp": "dp_replicate", "fsdp": "dp_shard"}.get(axis.strip(), axis.strip())
        if axis not in AXES:
            raise InputError(f"--mesh {part}: axes are dp (or dp_replicate), dp_shard, tp, cp, pp, ep")
        if not size.strip().isdigit() or not 1 <= int(size) <= 2**20:
            raise InputError(f"--mesh {part}: give a number of ranks, like {axis}=2")
        if axis in mesh:
            raise InputError(f"--mesh {part}: {axis} is given twice")
        mesh[axis] = int(size)
    return {axis: size for axis, size in mesh.items() if size > 1}


def capture(request: CaptureRequest, say: Callable[[str], None] = lambda _: None) -> CapturedGraph:
    """The step graph of a model; `say` is told what is done.

    Raises
    ------
    InputError
        The model cannot be captured; the line in the user's code where one exists.
    MissingCapabilityError
        The interpreter has no PyTorch.
    JobError
        The process failed otherwise, or took too long.
    """
    with scratch_folder("capture") as folder:
        answer = _answered(request, folder, say)
    plain = answer.steps.get("plain")
    if plain is None:
        raise JobError("the capture wrote no step")
    places = tuple(each for name, each in answer.steps.items() if name.startswith("mesh") and each is not None)
    step, grows, notes = with_growth(plain, {name: answer.steps.get(name) for name in ("batch", "sequence")})
    return CapturedGraph(
        version=VERSION,
        model=plain.kinds.get("", "model"),
        script=request.script.name,
        function=request.build,
        script_sha256=hashlib.sha256(request.script.read_bytes()).hexdigest(),
        torch=answer.torch,
        python=answer.python,
        dpro_search=__version__,
        batch=request.batch,
        sequence=request.sequence,
        precision=request.precision,
        optimizer=request.optimizer,
        mesh=dict(request.mesh),
        grows=grows,
        notes=(*filter(None, [answer.warning]), *answer.notes, *notes),
        plain=step,
        under_mesh=places[0] if places else None,
        places=places if len(places) > 1 else (),
        schedule=request.schedule if len(places) > 1 else "",
        virtual_stages=request.stages_on_rank if len(places) > 1 else 1,
        micro_batches=request.step_micro_batches,
        rotate=request.rotate,
    )


def _answered(request: CaptureRequest, folder: Path, say: Callable[[str], None]) -> _Answer:
    values: dict[str, Any] = {name: getattr(request, name) for name in ("inputs", "loss", "tp_plan", "parallelize", "batch")}
    values |= {name: getattr(request, name) for name in ("sequence", "precision", "optimizer", "bucket_mib")}
    values |= {"rotate": request.rotate, "schedule": request.schedule, "virtual_stages": request.stages_on_rank}
    values |= {"micro_batches": request.step_micro_batches}
    values |= {"script": str(request.script.resolve()), "function": request.build, "mesh": dict(request.mesh)}
    written = run_worker(request.python, _WORKER, values, folder, timeout_s=request.timeout_s, needs="PyTorch", say=say)
    answer = msgspec.json.decode(written, type=_Answer)
    if answer.error is not None:
        if "cannot import torch" in answer.error:
            raise MissingCapabilityError(f"{answer.error}; name an interpreter that can with --python")
        raise InputError(answer.error)
    return answer


def with_growth(plain: CapturedStep, doubled: Mapping[str, CapturedStep | None]) -> tuple[CapturedStep, tuple[str, ...], list[str]]:
    """The step with the growth of each tensor, the sizes that are known, and what is not.

    Parameters
    ----------
    doubled
        Steps at twice the "batch" and twice the "sequence".
    """
    known, notes, steps = [], [], {}
    for what, step in doubled.items():
        if step is None:
            continue
        if [op.name for op in step.ops] != [op.name for op in plain.ops] or len(step.saved) != len(plain.saved):
            notes.append(f"with twice the {what} the model runs other ops: its cost is known at the captured {what} only")
            continue
        known.append(what)
        steps[what] = step
    batch, sequence = steps.get("batch"), steps.get("sequence")
    ops = []
    for number, op in enumerate(plain.ops):
        twice = batch.ops[number] if batch else op
        longer = sequence.ops[number] if sequence else op
        ops.append(
            msgspec.structs.replace(
                op,
                inputs=_grown(op.inputs, twice.inputs, longer.inputs),
                outputs=_grown(op.outputs, twice.outputs, longer.outputs),
            )
        )
    saved = []
    for number, each in enumerate(plain.saved):
        powers = _power(each, batch, number), _power(each, sequence, number)
        saved.append(msgspec.structs.replace(each, grows=powers))
    return msgspec.structs.replace(plain, ops=tuple(ops), saved=tuple(saved)), tuple(known), notes


def _power(saved: SavedTensor, step: CapturedStep | None, number: int) -> int:
    return 0 if step is None else _POWERS.get(step.saved[number].size_bytes / max(saved.size_bytes, 1), 0)


def _grown(
    tensors: tuple[CapturedTensor, ...], twice: tuple[CapturedTensor, ...], longer: tuple[CapturedTensor, ...]
) -> tuple[CapturedTensor, ...]:
    if not len(tensors) == len(twice) == len(longer):
        return tensors
    return tuple(
        msgspec.structs.replace(tensor, grows="".join(map(_letter, tensor.shape, more.shape, long.shape)))
        if len(tensor.shape) == len(more.shape) == len(long.shape)
        else tensor
        for tensor, more, long in zip(tensors, twice, longer, strict=True)
    )


def _letter(size: int, twice: int, longer: int) -> str:
    if not size:
        return "."
    return _LETTERS.get((_POWERS.get(twice / size, 0), _POWERS.get(longer / size, 0)), ".")
