"""The program of one device as XLA compiled it: a module of computations, each a list of instructions.

A computation's instructions stand in the order of the text. If the module is scheduled, that is the order in which the device
starts them. The parser splits a line into name, opcode, shape, operands and attributes; what they mean is read when it is asked
for, because most of a large program is never looked at.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from dpro_search.collect.readers.xla.shapes import HloShape, parse_shape
from dpro_search.errors import TraceFormatError

# Lists of numbers, {{0,1},{2,3}}, are one token: there are long ones.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\{(?:\{[\d,]*\},?)+\}|[\[\](){},]')
_PERCENT_NAME = re.compile(r"%([\w.\-]+)")
_LAST_WORD = re.compile(r"%?([\w.\-]+)\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NUMBERS = re.compile(r"-?\d+")
_METADATA = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|([^\s"{}]+))')
_ALIAS = re.compile(r"\{([\d,\s]*)\}:\s*\((\d+),\s*\{([\d,\s]*)\}(?:,\s*([\w-]+))?\)")
_CALLS = (  # attributes that name computations, in the order of `HloInstruction.called`
    "calls",
    "to_apply",
    "condition",
    "body",
    "true_computation",
    "false_computation",
    "branch_computations",
    "called_computations",
    "select",
    "scatter",
)
_CALL = re.compile(rf"\b(?:{'|'.join(_CALLS)})=")
_FUSION = re.compile(r", kind=\w+, calls=%?([\w.\-]+)(?=,|$)")  # how nearly all fusions begin
_CONFIG, _JSON = "backend_config={", json.JSONDecoder()
_DEVICE_IDS = "device_ids"  # a part of `replica_groups` in the notation of a mesh, behind a comma of its own


@dataclass(frozen=True)
class SourceLine:
    """The line of the user's program that an instruction was made from."""

    file: str
    line: int
    function: str = ""  # Empty where the text does not say.


@dataclass(frozen=True)
class Alias:
    """An output of the module that takes the memory of a parameter, as donated arguments do."""

    output: tuple[int, ...]  # Index of the output in the root's tuple.
    parameter: int
    parameter_index: tuple[int, ...]  # Index within the parameter, if that is a tuple.
    must: bool  # Whether the two have to share memory, or may.


@dataclass(frozen=True, eq=False)
class HloInstruction:
    """One instruction. Its texts are as the program has them; the properties read them."""

    name: str  # Unique in its computation, without "%".
    opcode: str  # As HLO names it: "dot", "fusion", "all-gather-start"; also one that is not known here.
    shape_text: str
    operand_text: str  # Between the parentheses: names, a parameter's number, or a literal.
    attribute_text: str  # After the parentheses.
    is_root: bool
    line: int  # Number of the line in the text, from 1.

    @property
    def shape(self) -> HloShape:
        """Type of the result; `TraceFormatError` if the text is no shape."""
        try:
            return parse_shape(self.shape_text)
        except TraceFormatError as error:
            raise TraceFormatError(f"line {self.line}: {error}") from error

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions of the same computation whose results this one reads."""
        if self.opcode in ("parameter", "constant") or not self.operand_text:
            return ()
        if "%" in self.operand_text:
            return tuple(_PERCENT_NAME.findall(self.operand_text))
        parts = _split(_COMMENT.sub("", self.operand_text))
        return tuple(match[1] for part in parts if (match := _LAST_WORD.search(part)))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Value of each attribute as text; an attribute without a value has "" as its own."""
        return split_attributes(self.attribute_text)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that the instruction runs: of a fusion, loop, call, branch, reduction or asynchronous start."""
        if (fused := _FUSION.match(self.attribute_text)) is not None:
            return (fused[1],)
        if _CALL.search(self.attribute_text) is None:
            return ()
        return tuple(name for key in _CALLS for name in self._named_in(key))

    def computation(self, key: str) -> str:
        """Name of the computation in one attribute ("body", "condition", "to_apply"); `TraceFormatError` if there is none."""
        names = self._named_in(key)
        if not names:
            raise TraceFormatError(f"line {self.line}: {self.opcode} '{self.name}' names no computation as its '{key}'")
        return names[0]

    def dims(self, key: str) -> tuple[int, ...]:
        """The numbers of an attribute such as ``dimensions={0,2}``; empty where it is missing."""
        return tuple(int(number) for number in _NUMBERS.findall(self.attributes.get(key, "")))

    def number(self, key: str) -> int | None:
        """The number of an attribute such as ``channel_id=3`` or ``index=1``; None where it is missing."""
        numbers = self.dims(key)
        return numbers[0] if numbers else None

    @cached_property
    def control_predecessors(self) -> tuple[str, ...]:
        """Instructions of the same computation that have to end before this one starts, without giving it data."""
        return tuple(_PERCENT_NAME.findall(self.attributes.get("control-predecessors", "")))

    @property
    def custom_call_target(self) -> str:
        """Function that a custom call runs ("__cublas$lt$matmul", "tpu_custom_call"); "" for another instruction."""
        return _unquoted(self.attributes.get("custom_call_target", ""))

    @cached_property
    def backend_config(self) -> Mapping[str, Any]:
        """The compiler's decisions for this instruction; empty where it is missing, or not JSON (`attributes` has the text)."""
        text = self.attributes.get("backend_config", "")
        try:
            value = msgspec.json.decode(text)
            if isinstance(value, str):  # a text that holds JSON
                value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def estimated_cycles(self) -> int | None:
        """Cycles of the TPU's clock that its compiler expects; None where it gives none (GPUs, CPUs, Pallas kernels)."""
        cycles = _integer(self._config("window_config", "estimated_cycles"))
        return cycles or None  # a fusion that was not estimated has 0

    @property
    def known_trip_count(self) -> int | None:
        """How often a loop runs, where the compiler says so. On TPUs it never does: see `dpro_search.graph.hlo.trip_count`."""
        return _integer(self._config("known_trip_count", "n"))

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        """Origin of the instruction: ``op_name``, and ``stack_frame_id`` or (older) ``source_file`` and ``source_line``."""
        text = self.attributes.get("metadata", "")
        return {key: _unescaped(quoted) if quoted else plain for key, quoted, plain in _METADATA.findall(text)}

    @property
    def op_name(self) -> str:
        """Path of the JAX or TensorFlow operation, "jit(step)/while/body/dot_general"; "" where the text does not say."""
        return self.metadata.get("op_name", "")

    @property
    def sharding(self) -> str:
        """The sharding annotation as text, ``{devices=[4,2]<=[8]}``; "" where there is none."""
        return self.attributes.get("sharding", "")

    def __str__(self) -> str:
        return f"{self.opcode} %{self.name}"

    def _named_in(self, key: str) -> list[str]:
        text = self.attributes.get(key, "")
        if not text or text[0] == '"':
            return []
        return _PERCENT_NAME.findall(text) or [name.strip() for name in text.strip("{}").split(",") if name.strip()]

    def _config(self, part: str, key: str) -> object:
        value = self.backend_config.get(part)
        return value.get(key) if isinstance(value, dict) else None


@dataclass(frozen=True, eq=False)
class HloComputation:
    """A list of instructions with parameters and a result, the root."""

    name: str  # Without "%".
    instructions: tuple[HloInstruction, ...] = field(repr=False)
    is_entry: bool
    execution_thread: str  # "main" for the device's own program; "host" and "sparsecore" run beside it.
    line: int  # Number of its first line in the text.

    @cached_property
    def by_name(self) -> Mapping[str, HloInstruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> HloInstruction:
        """The instruction whose result is the computation's: the one marked ROOT, else the last."""
        return next((one for one in reversed(self.instructions) if one.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[HloInstruction, ...]:
        """The parameters in the order of their numbers."""
        parameters = [one for one in self.instructions if one.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda one: int(one.operand_text) if one.operand_text.strip().isdigit() else 0))

    @cached_property
    def users(self) -> Mapping[str, tuple[HloInstruction, ...]]:
        """The instructions that read each instruction's result, in order. One without users is not in it."""
        users: dict[str, list[HloInstruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return {name: tuple(readers) for name, readers in users.items()}

    def __getitem__(self, name: str) -> HloInstruction:
        """The instruction of a name; `TraceFormatError` if there is none."""
        instruction = self.by_name.get(name)
        if instruction is None:
            raise TraceFormatError(f"computation '{self.name}' (line {self.line}) reads '{name}', which it does not define")
        return instruction

    def operands(self, instruction: HloInstruction) -> tuple[HloInstruction, ...]:
        """The instructions that one of this computation reads; `TraceFormatError` if one is missing."""
        return tuple(self[name] for name in instruction.operands)

    def __iter__(self) -> Iterator[HloInstruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)


@dataclass(frozen=True, eq=False)
class HloModule:
    """A compiled program: what each device of the mesh runs (SPMD)."""

    name: str
    attributes: Mapping[str, str] = field(repr=False)  # Attributes of the module's first line, as text.
    computations: Mapping[str, HloComputation] = field(repr=False)  # In the order of the text: callees before their callers.
    entry_name: str
    tables: Mapping[str, tuple[str, ...]] = field(
        repr=False
    )  # "FileNames", "FunctionNames", "FileLocations", "StackFrames": rows as text.

    @property
    def entry(self) -> HloComputation:
        return self.computations[self.entry_name]

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of instructions is that in which a device runs them. It is not before optimisation."""
        return self.attributes.get("is_scheduled") == "true"

    @property
    def replica_count(self) -> int:
        """Number of replicas, each of `num_partitions` devices; JAX uses one."""
        return self._count("replica_count")

    @property
    def num_partitions(self) -> int:
        """Number of devices over which the program is partitioned (SPMD)."""
        return self._count("num_partitions")

    @property
    def devices(self) -> int:
        """Number of devices that run the program. Their numbers are places in the order that the job gave, not physical ones."""
        return self.replica_count * self.num_partitions

    @cached_property
    def input_output_alias(self) -> tuple[Alias, ...]:
        """Outputs that take the memory of parameters."""
        text = self.attributes.get("input_output_alias", "")
        return tuple(
            Alias(_indices(output), int(parameter), _indices(index), kind == "must-alias")
            for output, parameter, index, kind in _ALIAS.findall(text)
        )

    @property
    def instruction_count(self) -> int:
        return sum(map(len, self.computations.values()))

    def computation(self, name: str) -> HloComputation:
        """The computation of a name; `TraceFormatError` if there is none."""
        computation = self.computations.get(name)
        if computation is None:
            raise TraceFormatError(f"module '{self.name}' calls the computation '{name}', which it does not have")
        return computation

    def called_by(self, instruction: HloInstruction) -> tuple[HloComputation, ...]:
        """The computations that an instruction runs."""
        return tuple(self.computation(name) for name in instruction.called)

    @cached_property
    def callers(self) -> Mapping[str, tuple[tuple[HloComputation, HloInstruction], ...]]:
        """The instructions that run each computation, each with the computation that it stands in."""
        callers: dict[str, list[tuple[HloComputation, HloInstruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation:
                for name in instruction.called:
                    callers.setdefault(name, []).append((computation, instruction))
        return {name: tuple(pairs) for name, pairs in callers.items()}

    def source(self, instruction: HloInstruction) -> SourceLine | None:
        """The line of the user's program from which an instruction was made; None where the text does not say.

        It is the innermost frame. Newer texts number frames in tables after the first line, older ones have the file in each
        instruction's metadata.
        """
        metadata = instruction.metadata
        if "source_file" in metadata:
            return SourceLine(metadata["source_file"], _integer(metadata.get("source_line")) or 0)
        frame = self._row("StackFrames", metadata.get("stack_frame_id"))
        location = self._row("FileLocations", frame.get("file_location_id"))
        file, line = self._text("FileNames", location.get("file_name_id")), _integer(location.get("line"))
        return SourceLine(file, line or 0, self._text("FunctionNames", location.get("function_name_id"))) if file else None

    def __str__(self) -> str:
        scheduled = "" if self.is_scheduled else ", not scheduled"
        return f"{self.name}: {self.instruction_count} instructions for {self.devices} devices{scheduled}"

    def _count(self, key: str) -> int:
        return max(1, _integer(self.attributes.get(key)) or 1)

    def _row(self, table: str, number: str | None) -> Mapping[str, str]:
        return {key: plain for key, _, plain in _METADATA.findall(self._text(table, number))}

    def _text(self, table: str, number: str | None) -> str:
        row, rows = _integer(number), self.tables.get(table, ())
        return rows[row - 1] if row is not None and 0 < row <= len(rows) else ""


def split_attributes(text: str) -> dict[str, str]:
    """The attributes of an instruction or a module, ``, key=value, key={...}``, by key."""
    attributes: dict[str, str] = {}
    last = ""
    before, config, after = _at_config(text)
    for part in (*_split(before), *config, *_split(after)):
        key, _, value = part.strip().partition("=")
        if key == _DEVICE_IDS and last == "replica_groups":
            attributes[last] += f", {part.strip()}"
        elif key:
            attributes[key], last = value, key
    return attributes


def _at_config(text: str) -> tuple[str, list[str], str]:
    """The text before and after a backend's configuration, which is most of it, and this: JSON has a faster reader."""
    start = text.find(_CONFIG)
    if start >= 0 and text.count("{", 0, start) == text.count("}", 0, start):
        with contextlib.suppress(json.JSONDecodeError):
            _, end = _JSON.raw_decode(text, start + len(_CONFIG) - 1)
            return text[:start], [text[start:end]], text[end:]
    return text, [], ""


def _split(text: str) -> list[str]:
    """The parts between commas that are in no quotes and no brackets."""
    parts: list[str] = []
    depth = start = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == ",":
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        elif token in "[({":
            depth += 1
        elif token in "])}":
            depth -= 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def _indices(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBERS.findall(text))


def _integer(value: object) -> int | None:
    """A number that JSON or an attribute may have as text."""
    try:
        return int(value) if isinstance(value, (int, str)) else None
    except ValueError:
        return None


def _unquoted(text: str) -> str:
    return _unescaped(text[1:-1]) if len(text) > 1 and text[0] == text[-1] == '"' else text


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text) if "\\" in text else text
