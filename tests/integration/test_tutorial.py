"""The tutorial: its script and commands as they stand on the page, on a real job of two ranks, with the output that it shows."""

import json
import re
from pathlib import Path

import pytest
from shown_output import drift, printed, shown

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def test_the_tutorial_ends_with_a_proven_speed_up(torch_python, tmp_path):
    (script,) = re.findall(r"```python\n# train\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    blocks = shown(PAGE)
    outputs = printed(blocks, tmp_path, python=torch_python)
    (plan,) = json.loads((tmp_path / "runs" / "tutorial" / "validation.json").read_bytes())["plans"]
    assert plan["speedup_measured"] > 1, "smaller buckets overlap the backward pass"
    assert plan["losses"]["verdict"] == "same"
    assert (tmp_path / "tuned" / "ddp.py").is_file()
    assert (tmp_path / "tutorial.html").read_text().endswith("</html>\n")
    drifts = [drift(block, output) for block, output in zip(blocks, outputs, strict=True) if block.output]
    assert not any(drifts), "\n\n".join(filter(None, drifts))
