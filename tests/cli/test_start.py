"""Commands start without libraries that they do not use."""

import subprocess
import sys
from pathlib import Path


def loaded_by(*args: object) -> set[str]:
    """Modules that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "dpro_search.cli", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_help_loads_no_numerical_library() -> None:
    assert not loaded_by("--help") & {"numpy", "numba", "scipy", "optuna", "networkx"}


def test_a_search_of_the_sample_loads_only_the_libraries_that_it_uses(tmp_path: Path) -> None:
    loaded = loaded_by("run", "--trials", 2, "--json", "--out", tmp_path / "run")
    assert {"numpy", "numba", "optuna"} <= loaded
    assert not loaded & {"networkx", "sklearn", "xgboost", "scipy.stats", "sqlalchemy"}
