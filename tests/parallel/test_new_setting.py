"""A setting that is declared in the schema (`parallel/strategy.py`) is known to files, plans, texts, the page and caches."""

import subprocess
import sys
from pathlib import Path

from dpro_search.parallel import strategy as schema
from tests.parallel.jobs import text

DECLARED = """    new_setting: int = field(
        default=1, metadata=about("new setting {}", "what it does", label="the new one", least=1, changes=doubled("new_setting"))
    )
    global_batch: int = 1
"""
NAMED = """    expert_load: float | None = None
    new_setting: int | None = None
"""


def test_a_new_setting_is_declared_in_one_file(tmp_path: Path) -> None:
    """The package with a setting more in its schema, and in no other file."""
    source = Path(schema.__file__).read_text()
    source = source.replace("    global_batch: int = 1\n", DECLARED)
    source = source.replace("    expert_load: float | None = None\n", NAMED)
    (tmp_path / "strategy.py").write_text(source)
    (tmp_path / "job.toml").write_text(text("tp = 2\nnew_setting = 3"))
    script = Path(__file__).with_name("new_setting.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "strategy.py"), str(tmp_path / "job.toml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
