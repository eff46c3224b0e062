"""``parse_hlo(text)`` and ``read_hlo(path)``: HLO text to modules, in time linear in the text.

A module is a first line ``HloModule NAME, attributes``, tables of source lines, and computations: a line that ends in ``{``, one
instruction a line, and a line with ``}``. A file may hold several modules; a folder that XLA filled
(``XLA_FLAGS=--xla_dump_to=FOLDER``) holds one file for each module and stage of compilation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dpro_search._text import listed, near_names, shortened, visible
from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.xla.hlo import HloComputation, HloInstruction, HloModule, split_attributes
from dpro_search.errors import InputError, TraceFormatError

MOST_TEXT_BYTES = 4 << 30  # unpacked; the texts of the largest programs have some hundred megabytes

_MODULE = "HloModule "
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\(", re.DOTALL)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-<>]+)(?: \(.*)?\s*\{\s*$", re.DOTALL)
_TABLE_ROW = re.compile(r"\d+ (.*)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_THREAD = re.compile(r'execution_thread="([^"]*)"')
_PARENTHESIS = re.compile(r'"(?:[^"\\]|\\.)*"|[()]')
_FORMS_OF_HLO = ("HloModule", "ENTRY ")
# "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt": number, name, device and stage
_DUMPED = re.compile(r"(?:module_\d+\.)?(.+?)(?:\.cl_\d+)?\.(?:(?:sm_\d+\.)?\w*_)?after_optimizations\.(?:txt|hlo)(?:\.gz)?")
_MOST_NAMED = 8


@dataclass(frozen=True)
class HloProgram:
    """A module, and where it was read."""

    module: HloModule
    path: Path
    others: tuple[str, ...]  # Names of further modules that were dumped to the same folder.


def read_hlo(path: Path, module: str = "") -> HloProgram:
    """Read the scheduled program from a text file (optionally gzipped), or from a folder of ``--xla_dump_to``.

    Parameters
    ----------
    path
        A file that holds ``compiled.as_text()``, or the folder.
    module
        Name of the module, as its first line or (in a folder) its file name has it. Without a name, the only module of a file is
        read; of a folder that with the largest text after all optimisations, which is the training step.

    Raises
    ------
    InputError
        The path cannot be read, holds no such module, or the file has several of which none is named.
    TraceFormatError
        The text is no HLO, is cut off or damaged; the message has the line.
    """
    if path.is_dir():
        return _read_folder(path, module)
    modules = _modules_of_file(path)
    if not module and len(modules) > 1:
        raise InputError(f"{path}: holds {len(modules)} modules; say which one: {_names([one.name for one in modules])}")
    chosen = [one for one in modules if not module or one.name == module]
    if not chosen:
        raise _no_such_module(path, module, [one.name for one in modules])
    if len(chosen) > 1:
        raise InputError(f"{path}: holds {len(chosen)} modules of the name '{module}'; keep one of them in the file")
    return HloProgram(chosen[0], path, ())


def parse_hlo(text: str, source: str = "the text") -> tuple[HloModule, ...]:
    """The modules of a text; `source` names it in errors.

    Raises `TraceFormatError` with the line where the text is no HLO, or is cut off.
    """
    if not any(form in text for form in _FORMS_OF_HLO):
        raise TraceFormatError(
            f"{source}: not HLO text: no line begins with 'HloModule'; write compiled.as_text() of JAX, or the "
            "'after_optimizations' file of XLA_FLAGS=--xla_dump_to=FOLDER"
        )
    reader = _Reader(text.split("\n"), source)
    return tuple(reader.modules())


class _Reader:
    """Reads the lines of a text from the first to the last, each once."""

    def __init__(self, lines: Sequence[str], source: str) -> None:
        self._lines, self._source = lines, source
        self._place = 0  # index of the next line

    def modules(self) -> Iterator[HloModule]:
        """Each module of the text; lines before the first are skipped."""
        lines = self._lines
        while self._place < len(lines):
            line = lines[self._place]
            self._place += 1
            if line.startswith(_MODULE):
                yield self._module(line)

    def _module(self, first: str) -> HloModule:
        name, _, rest = first.removeprefix(_MODULE).partition(",")
        computations: dict[str, HloComputation] = {}
        tables: dict[str, tuple[str, ...]] = {}
        entry = ""
        begin = self._place
        while self._place < len(self._lines):
            line = self._lines[self._place]
            if line.startswith(_MODULE):
                break
            self._place += 1
            if line.strip() in _TABLES:
                tables[line.strip()] = self._table()
            elif line.rstrip().endswith("{") and (header := _COMPUTATION.match(line)) is not None:
                computation = self._computation(header[2], header[1] is not None)
                if computation.name in computations:
                    self._fail(computation.line, f"a second computation has the name '{computation.name}'")
                self._check(computation, computations)
                computations[computation.name] = computation
                entry = computation.name if computation.is_entry else entry
        if not entry:
            self._fail(begin, f"the module '{visible(shortened(name.strip(), 60))}' has no ENTRY computation: the text is cut off")
        return HloModule(name.strip(), split_attributes(rest), computations, entry, tables)

    def _check(self, computation: HloComputation, before: Mapping[str, HloComputation]) -> None:
        """Refuse an instruction that reads or calls what does not stand before it: in XLA's texts everything does.

        So nothing that follows operands or calls can run in a circle, whatever the text.
        """
        defined: set[str] = set()
        for instruction in computation:
            for name in instruction.operands:
                if name not in defined:
                    self._fail(instruction.line, f"'{instruction.name}' reads '{name}', which is not defined before it")
            for name in instruction.called:
                if name not in before:
                    self._fail(instruction.line, f"'{instruction.name}' calls '{name}', which is not defined before it")
            if instruction.name in defined:
                self._fail(instruction.line, f"a second instruction of '{computation.name}' has the name '{instruction.name}'")
            defined.add(instruction.name)

    def _table(self) -> tuple[str, ...]:
        rows = []
        while self._place < len(self._lines) and (row := _TABLE_ROW.match(self._lines[self._place])) is not None:
            rows.append(row[1].strip('"'))
            self._place += 1
        return tuple(rows)

    def _computation(self, name: str, is_entry: bool) -> HloComputation:
        """The instructions up to the closing brace."""
        lines, place, match = self._lines, self._place, _INSTRUCTION.match
        first, instructions = place, []
        while place < len(lines):
            line = lines[place]
            place += 1
            head = match(line)
            if head is None:
                if line.startswith("}"):
                    break
                if not line.strip() or line.lstrip().startswith("//"):
                    continue
                self._place = place
                self._fail(
                    place, f"expected an instruction of the computation '{name}', got '{visible(shortened(line.strip(), 60))}'"
                )
            begin, number = head.end(), place
            if line.endswith("={"):
                line, place = self._with_metadata(line, place)
            end = line.find(")", begin)
            if end < 0 or line.find("(", begin, end) >= 0:  # a tuple, a tiled layout or a literal among the operands
                line, place = self._joined(line, place)
                end = _closing(line, begin)
                if end < 0:
                    self._fail(number, f"the operands of '{head[2]}' in '{name}' are not closed: the text is cut off or damaged")
            instructions.append(
                HloInstruction(head[2], head[4], head[3], line[begin:end], line[end + 1 :], head[1] is not None, number)
            )
        else:
            self._fail(len(lines), f"the text ends in the middle of the computation '{name}': it is cut off")
        if not instructions:
            self._fail(first, f"the computation '{name}' has no instructions")
        self._place = place
        thread = _THREAD.search(line)
        return HloComputation(name, tuple(instructions), is_entry, thread[1] if thread else "main", first)

    def _joined(self, line: str, place: int) -> tuple[str, int]:
        """An instruction with the lines that a large constant takes, and the index of the line after it."""
        parts = [line]
        while place < len(self._lines):
            following = self._lines[place]
            if not following.strip() or following.startswith("}") or _INSTRUCTION.match(following) is not None:
                break
            parts.append(following)
            place += 1
        return "\n".join(parts), place

    def _with_metadata(self, line: str, place: int) -> tuple[str, int]:
        """An instruction with the lines of its kernel's metadata, which a brace closes, and the index of the line after it."""
        end = place
        while end < len(self._lines) and not self._lines[end].startswith("}"):
            end += 1
        if not self._lines[end : end + 1] or not self._lines[end].startswith("}}"):
            self._fail(place, "the attributes of the instruction are not closed: the text is cut off or damaged")
        return "\n".join([line, *self._lines[place : end + 1]]), end + 1

    def _fail(self, line: int, problem: str) -> NoReturn:
        raise TraceFormatError(f"{self._source}: line {line}: {problem}")


def _closing(line: str, begin: int) -> int:
    """Place of the parenthesis that closes the one before `begin`; -1 if none does."""
    depth = 1
    for match in _PARENTHESIS.finditer(line, begin):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def _modules_of_file(path: Path) -> tuple[HloModule, ...]:
    data = read_whole(path, MOST_TEXT_BYTES)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise TraceFormatError(
            f"{path}: not HLO text but binary data; write compiled.as_text() of JAX (a serialised HloProto cannot be read)"
        ) from None
    return parse_hlo(text, str(path))


def _read_folder(folder: Path, module: str) -> HloProgram:
    dumped = {path: match[1] for path in sorted(folder.iterdir()) if (match := _DUMPED.fullmatch(path.name)) is not None}
    if not dumped:
        raise InputError(
            f"{folder}: no file of a compiled module in it (a name that ends in 'after_optimizations.txt'); "
            "compile with XLA_FLAGS=--xla_dump_to=FOLDER"
        )
    chosen = [path for path, name in dumped.items() if not module or module in (name, path.name)]
    if not chosen:
        raise _no_such_module(folder, module, list(dumped.values()))
    largest = max(chosen, key=lambda path: (path.stat().st_size, path.name))
    modules = _modules_of_file(largest)
    others = tuple(dict.fromkeys(name for path, name in dumped.items() if path != largest))
    return HloProgram(modules[0], largest, others)


def _no_such_module(path: Path, module: str, names: Sequence[str]) -> InputError:
    near = near_names(module, names)
    hint = f"; did you mean {listed(near)}?" if near else ""
    return InputError(f"{path}: no module '{visible(shortened(module, 60))}'; it has {_names(names)}{hint}")


def _names(names: Sequence[str]) -> str:
    distinct = [visible(shortened(name, 60)) for name in dict.fromkeys(names)]
    more = f" and {len(distinct) - _MOST_NAMED} more" if len(distinct) > _MOST_NAMED else ""
    return ", ".join(distinct[:_MOST_NAMED]) + more
