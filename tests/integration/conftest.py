"""Where the frameworks are: tests here run real jobs, and skip where the environment was not built."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tensorflow_python() -> str:
    """Python of the environment with TensorFlow and Horovod."""
    return _python_of("tensorflow")


@pytest.fixture(scope="session")
def torch_python() -> str:
    """Python of the environment with PyTorch."""
    return _python_of("torch")


def _python_of(name: str) -> str:
    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    interpreter = root / name / "bin" / "python"
    if not interpreter.is_file():
        pytest.skip(f"no environment at {interpreter}; build it with scripts/make_env.sh {name}")
    return str(interpreter)
