"""`XlaProgram`: a compiled program, the devices it was compiled for, and what else was written down beside it.

``program.json`` is the file of `ProgramFacts` in a captured folder, beside ``program.hlo.gz``. A text alone has no facts: then
``--cluster`` says which devices run the program, in the order in which JAX lists them.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.collect.readers.xla import HloModule, read_hlo
from dpro_search.errors import InputError
from dpro_search.kinds._kind import Description
from dpro_search.kinds.xla.times import TIMES_FILE, ProgramTimes, read_times

FACTS_FILE, TEXT_FILE = "program.json", "program.hlo.gz"
_TEXT_ENDINGS = (".hlo", ".hlo.gz", ".txt", ".txt.gz")
_DUMPED = "*after_optimizations.txt*"
_FIRST_BYTES = 1 << 16  # of a text, among which the line "HloModule" stands


class ProgramMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device, in bytes, as the compiler allocated it (``compiled.memory_analysis()``)."""

    arguments_bytes: int
    outputs_bytes: int
    aliased_bytes: int  # Outputs that take the place of arguments.
    temporaries_bytes: int
    code_bytes: int = 0
    host_bytes: int = 0  # In the host's memory: arguments, outputs and temporaries.
    peak_live_bytes: int = 0  # The most that buffers in use take at a time, without gaps between them; 0: not known.

    @property
    def peak_bytes(self) -> int:
        """Memory of all buffers. A TPU's compiler has let programs through whose sum was 2 to 16 % more than the chip has."""
        return self.arguments_bytes + self.outputs_bytes - self.aliased_bytes + self.temporaries_bytes + self.code_bytes


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``program.json``.

    Attributes
    ----------
    platform
        The compiler's: "tpu", "cuda" or "cpu"; empty: not known, but not a TPU's.
    cluster
        The devices, as ``--cluster`` takes them ("v6e:4x4", "4xhgx-h100"); empty: not known.
    mesh
        Size of each axis of the mesh, in order.
    device_ids
        For each device of the mesh, in the mesh's order, its place in the list of the topology's devices; empty: the same order.
    coordinates, slices
        The chip of each device of the topology's list, and its slice (TPUs).
    tokens
        Tokens of a step, over all devices; None: not known.
    choices, chosen
        The values of the script's ``CHOICES`` by name and text, the default first; a value that JSON cannot hold is None. And
        for each name the text of the value that was compiled.
    memory
        None: the compiler did not say.
    compile_s
        Seconds that lowering and compiling took.
    versions, flags, script
        Versions of the packages, ``XLA_FLAGS``, and the function that was compiled ("train.py:step").
    script_path, python
        Where the script and the interpreter are, to compile it for another mesh; empty: it cannot be.
    """

    format: Literal["dpro-search/xla-program/1"] = "dpro-search/xla-program/1"
    platform: str = ""
    cluster: str = ""
    mesh: dict[str, int] = msgspec.field(default_factory=dict)
    device_ids: tuple[int, ...] = ()
    coordinates: tuple[tuple[int, int, int], ...] = ()
    slices: tuple[int, ...] = ()
    tokens: int | None = None
    choices: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)  # Any: values are the script's own
    chosen: dict[str, str] = msgspec.field(default_factory=dict)
    memory: ProgramMemory | None = None
    compile_s: float | None = None
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    flags: str = ""
    script: str = ""
    script_path: str = ""
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class XlaProgram(Description):
    """A compiled program, and what is known about it."""

    module: HloModule
    facts: ProgramFacts
    cluster: Cluster | None  # The devices that it was compiled for; None: not known.
    path: Path
    times: ProgramTimes | None = None  # None: the program was compiled, and never ran.
    framework: str = field(default="jax")

    @cached_property
    def text_digest(self) -> str:
        """A digest of the file that has the program's text: equal for equal programs that captures wrote."""
        return hashlib.sha256(next(iter(self.files.values())).read_bytes()).hexdigest()


def read_program(path: Path) -> XlaProgram | None:
    """The program of a captured folder, a folder of ``--xla_dump_to``, or a text; None: the path is none of these.

    Raises
    ------
    InputError
        The folder or file is damaged, or its cluster is not known.
    TraceFormatError
        The text is damaged; the message has the line.
    """
    if path.is_dir():
        if (path / FACTS_FILE).is_file():
            return _captured(path)
        return _text_alone(path) if any(path.glob(_DUMPED)) else None
    if path.name == FACTS_FILE and path.with_name(TEXT_FILE).is_file():
        return _captured(path.parent)
    return _text_alone(path) if path.name.endswith(_TEXT_ENDINGS) and _is_hlo(path) else None


def _captured(folder: Path) -> XlaProgram:
    try:
        facts = msgspec.json.decode((folder / FACTS_FILE).read_bytes(), type=ProgramFacts)
    except msgspec.DecodeError as error:
        raise InputError(f"{folder / FACTS_FILE}: {error}; capture the program again") from error
    program = read_hlo(folder / TEXT_FILE)
    cluster = parse_cluster(facts.cluster) if facts.cluster else None
    if facts.device_ids and len(facts.device_ids) != program.module.devices:
        raise InputError(
            f"{folder / FACTS_FILE}: device_ids has {len(facts.device_ids)} entries, and the program runs on "
            f"{program.module.devices} devices"
        )
    times = read_times(folder / TIMES_FILE)
    names = (TEXT_FILE, FACTS_FILE, *([TIMES_FILE] if times is not None else []))
    return XlaProgram(
        module=program.module,
        facts=facts,
        cluster=cluster,
        path=folder,
        times=times,
        files={name: folder / name for name in names},
        warnings=(*_warnings(program.module), *([times.warning] if times is not None and times.warning else [])),
        provenance=tuple(_provenance(program.module, facts)),
    )


def _text_alone(path: Path) -> XlaProgram:
    program = read_hlo(path)
    facts = ProgramFacts(platform="tpu" if _is_tiled(program.module) else "")
    others = f"the folder has {len(program.others)} more modules, which are left out" if program.others else ""
    return XlaProgram(
        module=program.module,
        facts=facts,
        cluster=None,
        path=path,
        files={program.path.name: program.path},
        warnings=(*_warnings(program.module), *filter(None, [others])),
        provenance=tuple(_provenance(program.module, facts)),
    )


def _is_tiled(module: HloModule) -> bool:
    """Whether layouts have tiles, ``T(8,128)``, as those of TPUs have."""
    return any(":T(" in each.shape_text for each in module.entry)


def _warnings(module: HloModule) -> tuple[str, ...]:
    if module.is_scheduled:
        return ()
    return (
        "the program is not scheduled (is_scheduled=true is missing): its order is that of the text, in which nothing overlaps; "
        "compile it, and take the text after optimisations",
    )


def _provenance(module: HloModule, facts: ProgramFacts) -> list[tuple[str, str]]:
    rows = [("program", f"{module.name}, {module.instruction_count} instructions, {module.devices} devices")]
    if facts.mesh:
        rows.append(("mesh", ", ".join(f"{axis}={size}" for axis, size in facts.mesh.items())))
    if facts.chosen:
        rows.append(("choices", ", ".join(f"{name}={text}" for name, text in facts.chosen.items())))
    rows += [(name, version) for name, version in facts.versions.items()]
    if facts.compile_s is not None:
        rows.append(("compiled in", f"{facts.compile_s:.0f} s"))
    return rows


def _is_hlo(path: Path) -> bool:
    """Whether a text begins like HLO."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            return b"HloModule " in file.read(_FIRST_BYTES)
    except (OSError, EOFError, zlib.error):
        return False
