"""docs/cli.md equals the verbs' code."""

import inspect
import re

from dpro_search.cli import VERBS, loaded
from scripts.make_cli_reference import PAGE, page, section
from tests.every_case import every_case


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "write it again: python scripts/make_cli_reference.py"


@every_case("verb", VERBS)
def test_every_verb_has_a_sentence_the_common_options_and_an_example(verb):
    text = section(verb)
    assert {"as_json", "quiet"} <= inspect.signature(loaded(VERBS[verb])).parameters.keys(), "described once, in the head"
    assert re.search(r"\n\n[A-Z].*\.\s*\Z", text.split("```")[0], re.DOTALL)
    assert f"\ndpro-search {verb}" in text.split("Example:")[1]


def test_values_defaults_and_needs_are_shown():
    text = section("collect")
    assert "dpro-search collect [OPTIONS] -- CMD..." in text
    assert "(required)" in text
    assert "tensorflow, pytorch, mxnet" in text
    assert "default: 2)" in text
