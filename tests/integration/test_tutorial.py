"""The tutorial: its script and its commands as they stand on the page, on a real job of two ranks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def test_the_tutorial_ends_with_a_proven_speed_up(tensorflow_python, tmp_path):
    text = PAGE.read_text()
    (script,) = re.findall(r"```python\n# train\.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    commands = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    program = f'dpro-search() {{ "$core" -m dpro_search.cli "$@"; }}\n{commands}'
    env = {**os.environ, "python": tensorflow_python, "core": sys.executable}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    (plan,) = json.loads((tmp_path / "runs" / "tutorial" / "validation.json").read_bytes())["plans"]
    assert plan["speedup_measured"] > 1, "fusion pays where the job had none"
    assert (tmp_path / "tuned" / "horovod.env").is_file()
    assert (tmp_path / "tutorial.html").read_text().endswith("</html>\n")
