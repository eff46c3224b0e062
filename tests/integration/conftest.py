"""Where the frameworks are: tests here run real jobs, and skip where the environment was not built."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tensorflow_python() -> str:
    """Python of the environment with TensorFlow and Horovod."""
    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    interpreter = root / "tensorflow" / "bin" / "python"
    if not interpreter.is_file():
        pytest.skip(f"no TensorFlow environment at {interpreter}; build it with scripts/make_env.sh tensorflow")
    return str(interpreter)
