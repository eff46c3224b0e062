"""Examples in the documentation run and give what they say."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def examples():
    for path in sorted(DOCS.glob("*.md")):
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)):
            yield pytest.param(code, id=f"{path.name}-{number}")


@pytest.mark.parametrize("code", list(examples()))
def test_an_example_gives_the_values_in_its_comments(code):
    scope = {}
    for line in code.splitlines():
        expected = re.fullmatch(r"(\S.*?)  # ([-\d.]+)(:.*)?", line)
        if expected:
            exec(code[: code.index(line)], scope)
            assert eval(expected[1], scope) == float(expected[2]), line
    exec(code, scope)
