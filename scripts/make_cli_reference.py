"""Write docs/cli.md from the verbs' own code: python scripts/make_cli_reference.py"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from dpro_search.cli import VERBS, loaded

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# The command line

<!-- Written by scripts/make_cli_reference.py; change the verbs instead. -->

`dpro-search --help` lists the verbs, `dpro-search VERB --help` shows the options of one. All verbs have these in common:

* `--json` prints one JSON object on stdout and nothing else; progress and warnings go to stderr. `--quiet` omits them.
* The exit code is 0 after success, 1 if a job or this machine failed (or after Ctrl-C), 2 after wrong usage or bad input. An error
  is one line on stderr that says what to do.
* An output is complete or absent. A folder to write must not exist, except the run folder of `run`, which is continued.
* Colours and progress bars appear on a terminal only; `NO_COLOR=1` disables colours.
* `dpro-search --install-completion` lets the shell complete verbs and options (bash, zsh, fish, PowerShell).

Without `TRACE`, a verb takes the recording that comes with the package.
"""
_COMMON = ("--json", "--quiet")  # described once, in `HEAD`
_PLACEHOLDER = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"\n{section(name)}" for name in VERBS)


def section(name: str) -> str:
    """One verb: its docstring, its usage, its arguments and options."""
    function = loaded(VERBS[name])
    parameters = [Parameter(found) for found in inspect.signature(function).parameters.values()]
    text, _, example = inspect.cleandoc(function.__doc__ or "").partition("Example: ")
    arguments = [parameter for parameter in parameters if parameter.positional]
    options = [
        parameter for parameter in parameters if not parameter.positional and parameter.names[:1] not in {(n,) for n in _COMMON}
    ]
    usage = " ".join(["dpro-search", name, "[OPTIONS]", *(parameter.usage for parameter in arguments)])
    parts = [f"## {name}", text.strip(), f"```\n{usage}\n```", _table(arguments, "argument"), _table(options, "option")]
    if example:
        parts.append("Example:\n\n```\n" + "\n".join(" ".join(line.split()) for line in example.split(";")) + "\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


class Parameter:
    """A parameter of a verb's function, as the command line shows it."""

    def __init__(self, found: inspect.Parameter) -> None:
        assert get_origin(found.annotation) is Annotated, f"{found.name}: no typer.Option or typer.Argument"
        annotation, self.info = get_args(found.annotation)[:2]
        self.type = _one_type(annotation)
        self.several = get_origin(_without_none(annotation)) is list
        self.default = found.default
        self.positional = type(self.info).__name__ == "ArgumentInfo"
        # typer.Option("--out") in an annotation takes the first name for a default, and only the rest for names.
        self.names = tuple(name for name in (self.info.default, *(self.info.param_decls or ())) if isinstance(name, str))

    @property
    def required(self) -> bool:
        return self.default in (inspect.Parameter.empty, ...)

    @property
    def value(self) -> str:
        """What stands for the value, "" for a flag."""
        if self.type is bool:
            return ""
        if self.info.metavar:
            return str(self.info.metavar)
        return "NAME" if issubclass(self.type, Enum) else _PLACEHOLDER[self.type]

    @property
    def usage(self) -> str:
        """Of an argument: brackets where it may be left out."""
        return self.value if self.required or self.value.startswith("[") else f"[{self.value}]"

    @property
    def row(self) -> tuple[str, str]:
        """Name and value, and what it means."""
        shown = self.value if self.positional else " ".join(part for part in (", ".join(self.names), self.value) if part)
        notes = "; ".join(self._notes())
        return f"`{shown}`", " ".join(part for part in (self.info.help or "", f"({notes})" if notes else "") if part)

    def _notes(self) -> Iterator[str]:
        if issubclass(self.type, Enum):
            yield f"NAME: {', '.join(str(member.value) for member in self.type)}"
        if self.required and not self.positional:
            yield "required"
        if self.several and not self.positional:
            yield "may be repeated"
        if isinstance(self.info.show_default, str):
            yield f"default: {self.info.show_default}"
        elif not self.required and self.default is not None and self.default is not False:
            yield f"default: {self.default.value if isinstance(self.default, Enum) else self.default}"


def _table(parameters: list[Parameter], title: str) -> str:
    rows = [parameter.row for parameter in parameters if not parameter.info.hidden]
    if not rows:
        return ""
    escaped = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([f"| {title} | |", "|---|---|", *(f"| {row} |" for row in escaped)])


def _one_type(annotation: Any) -> type:
    """The type of one value: `int` of `list[int] | None`."""
    found = _without_none(annotation)
    return get_args(found)[0] if get_origin(found) is list else found


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(kind for kind in get_args(annotation) if kind is not types.NoneType)
    return annotation


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
