"""`JobFacts`: the job that follows a plan. `Part`: what one target needs for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dpro_search.collect.modules import ModuleInfo
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.runtime import FOLLOW
from dpro_search.space.plan import Plan

FOLDER = "{folder}"
HELPERS = (
    "ddp.py",
    "fsdp.py",
    "micro_batches.py",
    "modules.py",
    "parallel_plan.py",
    "planned_mesh.py",
    "tape.py",
    "trainer.py",
    "xla.py",
)
TRAINER_LINE = "`from trainer import planned_options`, and `**planned_options()` among the arguments of the Trainer."


@dataclass(frozen=True)
class Servers:
    """Recorded parameter servers: their number (0: none, or not known), and whether they were on the workers' hosts."""

    count: int = 0
    on_workers: bool = False


class DescribedWorkload(Protocol):
    """A described parallel job under one plan: `dpro_search.parallel.workload.Workload`."""

    @property
    def precision(self) -> str:
        """Number format of the products, like "bf16"."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The mesh and the choices of a step that was compiled, and which other values its script declares."""

    mesh: Mapping[str, int] = field(default_factory=dict)  # Devices along each axis; empty: not known.
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # Any: the script's own values, by name and text.
    chosen: Mapping[str, str] = field(default_factory=dict)  # The text of the value that was compiled, by name.
    platform: str = ""  # "tpu", "cuda" or "cpu"; empty: not known.


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The known facts about the job that will follow a plan."""

    framework: str | None = None  # "tensorflow", "pytorch" or "mxnet"; None: not known.
    tensors: Sequence[TensorInfo] = ()  # The gradients in the order in which they become ready; empty: not known.
    ready_order: bool = False  # Whether that is the order of `tensors`.
    # op_types, op_inputs: Of every op of rank 0's graph: its type, and the ops that it needs; empty: not known.
    op_types: Mapping[str, str] = field(default_factory=dict)
    op_inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    modules: Sequence[ModuleInfo] = ()  # The model's modules that a plan can name; empty: not known.
    servers: Servers = field(default_factory=Servers)  # Recorded parameter servers.
    on_mpi: bool | None = None  # Whether Horovod communicates by MPI; None: not known.
    # Recorded settings of the communication library, by the name of their environment variable or argument.
    knobs: Mapping[str, str] = field(default_factory=dict)
    # ranks, ranks_per_host: How many there are, and side by side on each host; None: not known, or hosts differ.
    ranks: int | None = None
    ranks_per_host: int | None = None
    # What a plan makes of a described parallel job: its model, degrees and batch; None: it is no such job, or not known.
    workload: Callable[[Plan], DescribedWorkload] | None = None
    compiled: CompiledStep = field(default_factory=CompiledStep)  # Facts of a compiled program.

    @staticmethod
    def of(trace: Trace) -> JobFacts:
        """The facts of a recording."""
        types: dict[str, str] = {}
        inputs: dict[str, list[str]] = {}
        if trace.graphs:
            graph = trace.graphs[trace.graph_of_rank[0]]
            for i, (name, kind) in enumerate(zip(graph.name, graph.op, strict=True)):
                types[name] = kind
                inputs[name] = [graph.name[k] for k in graph.input_idx[graph.input_ptr[i] : graph.input_ptr[i + 1]]]
        controller = trace.meta.knobs.get("HOROVOD_CONTROLLER")
        return JobFacts(
            framework=trace.meta.framework,
            tensors=trace.tensors,
            op_types=types,
            op_inputs=inputs,
            modules=trace.modules,
            on_mpi=None if controller is None else controller == "mpi",
            knobs=trace.meta.knobs,
            ranks=trace.meta.ranks,
            ranks_per_host=trace.meta.ranks_per_host,
        )


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """How the ranks of a described job are started for a few steps: words and lines of bash.

    `$FOLDER` is the folder of the exported files, `$SCRIPT` the user's training script and `$STEPS` the number of steps.
    """

    program: str  # The words that follow `torchrun` or `launcher`.
    hosts: int
    ranks_per_host: int
    gpus: bool  # Whether ranks compute on GPUs.
    script: str = "train.py"  # File name of the script; empty: the program needs none.
    prepare: tuple[str, ...] = ()  # Lines before the start.
    launcher: str | None = None  # In place of `torchrun`.
    short: str = ""  # Arguments that end the run after `$STEPS` steps and log each; empty: the script's own.
    logs_steps: bool = True  # Whether the log has step times in a form that is known.


@dataclass(frozen=True, kw_only=True)
class Part:
    """The needs of one target that follows a plan."""

    # Variables of every process of the job; `FOLDER` in a value stands for the path of the folder that is written.
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)  # Content by name.
    step: Mapping[str, object] = field(default_factory=dict)  # What `xla.py` does to the graph of a TensorFlow step.
    script: tuple[str, ...] = ()  # What changes in the training script, in words, a sentence each; empty: nothing.
    setup: tuple[str, ...] = ()  # What else must hold of the job, likewise.
    start: str | None = None  # How a job that follows this plan is started; None: as the target says.
    short_run: ShortRun | None = None  # How its ranks are started to measure the plan; None: not known.
    on_path: bool = False  # Whether PYTHONPATH must name the folder though the training script stays as it is.

    @property
    def helpers(self) -> tuple[str, ...]:
        """Files that the training script must use."""
        return tuple(name for name in self.files if name in HELPERS)

    @property
    def changes_script(self) -> bool:
        """Whether the training script must change."""
        return bool(self.helpers or self.step)


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A system that follows a plan, or a part of it."""

    name: str  # What ``--target`` calls it.
    fields: tuple[str, ...]  # Plan fields that it can express.
    # What it needs for a plan in a job; raises `InputError` for what it cannot express there.
    part: Callable[[Plan, JobFacts], Part]
    framework: str | None = None  # The only framework whose jobs have it; None: there are several.
    communicates: bool = False  # Whether it carries gradients: a job has one such system.
    start: str = "python train.py"  # How a job that follows it is started.
    always_env: bool = False  # Whether ``<name>.env`` is written even if it is empty.
    servers: bool = False  # Whether its variables are also for the scheduler and the servers.
    why_not: Mapping[str, str] = field(default_factory=dict)  # Reasons why it cannot express some fields, by field.

    def __str__(self) -> str:
        return self.name


def numbers(values: Mapping[str, int | None]) -> dict[str, str]:
    """Variables that a plan sets."""
    return {name: str(value) for name, value in values.items() if value is not None}


def micro_batch_files(count: int) -> dict[str, bytes]:
    """The helper that divides a batch, and into how many parts."""
    return {
        "micro_batches.json": as_json({"version": 1, "micro_batches": count}),
        "micro_batches.py": helper_file("micro_batches.py"),
    }


def trainer_files(options: Mapping[str, object]) -> dict[str, bytes]:
    """The helper that adds options to MXNet's trainers, and the options."""
    return {"trainer.json": as_json({"version": 1, "options": options}), "trainer.py": helper_file("trainer.py")}


def helper_file(name: str) -> bytes:
    """Content of a helper that runs in the job."""
    return (FOLLOW / name).read_bytes()


def as_json(content: object) -> bytes:
    """A file of a plan, for people to read as well."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
