"""Commands that a page shows with their output, against what the commands print.

A block of commands, marked ``bash``, with a block marked ``text`` after it shows what these commands print on stdout. Words and
heads of tables must be equal; numbers, units of time, widths of columns and line breaks may differ. ``...`` stands for any words.
The lines that name a mean iteration beside the median may be absent: they are printed only where the machine let some steps stall.
"""

import difflib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```bash\n(.*?)^```\n(?:\s*```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_TIME = re.compile(r"# (?:us|ms|s)(?![a-z])")
_STALLED = re.compile(
    r"^.* mean .*\(some steps stall.*\n|The mean is [^,]*, because some steps stall; this is the median\.", re.MULTILINE
)
_RULE = re.compile(r"[─│\s]+")
_MARK = "== end of a block =="


@dataclass(frozen=True)
class Shown:
    """A block of a page."""

    commands: str
    output: str | None  # None: the page shows no output of it.


def shown(page: Path) -> list[Shown]:
    """All blocks of commands of a page, in order."""
    return [Shown(commands, output or None) for commands, output in _BLOCK.findall(page.read_text())]


def printed(blocks: list[Shown], folder: Path, timeout_s: float = 900, **env: str) -> list[str]:
    """What each block prints on stdout, all run in one shell in a folder; a command that fails fails the test."""
    define = 'dpro-search() { "$core" -m dpro_search.cli "$@"; }\npip() { :; }\n'
    program = define + "".join(f"{block.commands}\necho '{_MARK}'\n" for block in blocks)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program],
        cwd=folder,
        env={**os.environ, "core": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(f"{_MARK}\n")[:-1]


def words(text: str) -> str:
    """The words of an output, with what may differ left out."""
    return _TIME.sub("#", _NUMBER.sub("#", _RULE.sub(" ", _STALLED.sub("", text)).strip()))


def drift(block: Shown, output: str) -> str:
    """Empty if the page shows the output, else how they differ."""
    pattern = ".*".join(re.escape(words(part)) for part in block.output.split("..."))
    if re.fullmatch(re.sub(r"(\\ )?\.\*(\\ )?", ".*", pattern), words(output)):
        return ""
    lines = difflib.unified_diff(block.output.splitlines(), output.splitlines(), "the page", "printed", lineterm="", n=1)
    return "\n".join((f"the page shows another output of\n{block.commands}", *lines, "\nto paste, shortened with '...':\n", output))
