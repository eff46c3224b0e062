"""Examples in the documentation run and give what they say."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def pages():
    for path in sorted(DOCS.rglob("*.md")):
        # A block that begins with a file's name is that file: the reader's script.
        examples = [code for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL) if not code.startswith("# ")]
        if examples:
            yield pytest.param(examples, id=str(path.relative_to(DOCS)))


@pytest.mark.parametrize("blocks", list(pages()))
def test_the_examples_of_a_page_give_the_values_in_their_comments(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for code in blocks:
        for line in code.splitlines():
            expected = re.fullmatch(r"(\S.*?)  # ([-\d.]+)(:.*)?", line)
            if expected:
                exec(code[: code.index(line)], scope)
                assert eval(expected[1], scope) == float(expected[2]), line
        exec(code, scope)
