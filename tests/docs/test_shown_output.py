"""The README and the how-tos show what the commands print, where these run on a bundled sample."""

import re
import shlex
from pathlib import Path

import pytest
from shown_output import Shown, drift, printed, shown

from tests.in_process import done_once, succeeds

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"  # its commands train a model: tests/integration/test_tutorial.py
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page != TUTORIAL]
BLOCKS = [
    pytest.param(block, id=f"{page.name}: {block.commands.strip()}") for page in PAGES for block in shown(page) if block.output
]

# A command that needs no shell, and the file that its output goes to.
_COMMAND = re.compile(r"(?:pip install \. && )?dpro-search ([^|<>&;\n]+?)(?: > ([\w.]+))?\n")


@pytest.mark.parametrize("block", BLOCKS)
def test_a_page_shows_what_its_commands_print(block, tmp_path):
    assert not (text := drift(block, output_of(block, tmp_path))), text


def output_of(block: Shown, folder: Path) -> str:
    """The output of a block's commands, in this process where they need no shell."""
    commands = list(_COMMAND.finditer(block.commands))
    if "".join(command[0] for command in commands) != block.commands:
        return printed([block], folder)[0]
    if len(commands) == 1 and commands[0][2] is None:
        return done_once(*shlex.split(commands[0][1]))[1]
    output = ""
    for words, file in (command.groups() for command in commands):
        text = succeeds(*shlex.split(words), cwd=folder)
        if file is None:
            output += text
        else:
            (folder / file).write_text(text)
    return output


SHOWN = Shown("dpro-search ...", "A table of 3 rows\n\n  plan      time\n  fast   1.5 ms\n  ...\nDone, in 3 s.\n")


@pytest.mark.parametrize(
    ("output", "same"),
    [
        (
            "A table of 12 rows\n\n  plan         time\n ────────────\n  fast   91.2 us\n  slow   3.1 s\nDone, in\n0.2 s.\n",
            True,
        ),
        ("A table of 3 rows\n\n  plan  iteration\n  fast   1.5 ms\nDone, in 3 s.\n", False),
        ("A table of 3 rows\n\n  plan      time\n  fast   1.5 ms\nDone, in 3 s.\nOne line more.\n", False),
        ("A table of 3 rows\n\n  plan      time\n  fast   1.5 ms\n", False),
    ],
)
def test_numbers_and_breaks_may_differ_words_may_not(output, same):
    assert (not drift(SHOWN, output)) == same
