"""Where the frameworks are: tests here run real jobs, and skip where the environment was not built."""

import os
import subprocess
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


@pytest.fixture(scope="session")
def mxnet_python() -> str:
    """Python of the environment with MXNet and Horovod."""
    return _python_of("mxnet")


@pytest.fixture(scope="session")
def parallel_python() -> str:
    """Python of the environment with frameworks for parallel jobs."""
    return _python_of("parallel")


@pytest.fixture(scope="session")
def synchronisation_python() -> str:
    """Python of the environment with PyTorch and Ray."""
    return _python_of("synchronisation")


@pytest.fixture(scope="session")
def peers_python() -> str:
    """Python of the environment with other predictors of training steps."""
    return _python_of("peers")


@pytest.fixture(scope="session")
def jax_python() -> str:
    """Python of the environment with JAX, and perhaps with XLA's compilers for TPUs and GPUs."""
    return _python_of("jax")


@pytest.fixture(scope="session")
def byteps_python(mxnet_python: str) -> str:
    """The same, where it has BytePS as well, which has no wheel: it is built for the machine's GPUs."""
    done = subprocess.run([mxnet_python, "-c", "import byteps.mxnet"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{mxnet_python} cannot import byteps: {(done.stderr.strip().splitlines() or [''])[-1]}")
    if os.geteuid() != 0:
        pytest.skip("workers of BytePS on one machine need root: each gets a /dev/shm of its own")
    return mxnet_python


def _python_of(name: str) -> str:
    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    interpreter = root / name / "bin" / "python"
    if not interpreter.is_file():
        pytest.skip(f"no environment at {interpreter}; build it with scripts/make_env.sh {name}")
    return str(interpreter)
