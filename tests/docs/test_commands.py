"""Every command that the README, the pages and SKILL.md show is one that the command line takes."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

from dpro_search.cli import VERBS, loaded
from scripts.make_cli_reference import Parameter
from tests.every_case import every_case

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SKILL.md", *sorted((ROOT / "docs").rglob("*.md"))]
_COMMAND = re.compile(r"^ *dpro-search ([a-z].*)$", re.MULTILINE)
_INLINE = re.compile(r"`dpro-search ([a-z][^`]*)`")


def commands():
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for command in [*_COMMAND.findall(blocks), *_INLINE.findall(text)]:
            yield pytest.param(command, id=f"{page.name}: {command}")


@every_case("command", list(commands()))
def test_a_shown_command_has_a_verb_and_options_that_exist(command):
    verb, *words = shlex.split(command.partition("  #")[0])
    if verb == "VERB":
        return
    assert verb in VERBS
    known = {
        name for parameter in inspect.signature(loaded(VERBS[verb])).parameters.values() for name in Parameter(parameter).names
    }
    verb_words = words[: words.index("--")] if "--" in words else words
    options = {word.partition("=")[0] for word in verb_words if word.startswith("-")}
    assert options <= known | {"--help"}
