"""The code inside jobs runs on Python 3.8, without the package."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

import dpro_search.runtime

RUNTIME = Path(dpro_search.runtime.__file__).parent
FILES = sorted(RUNTIME.rglob("*.py"))
FLAT = [path for path in FILES if path.parent.parent == RUNTIME and path.name not in ("__init__.py", "sitecustomize.py")]
# Imports each file of a folder by its flat name, and prints what went wrong; frameworks may be missing.
_IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in ("torch", "tensorflow", "mxnet", "horovod", "numpy", "mpi4py"):
            print(name, error)
    except Exception as error:
        print(name, error)
"""


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(RUNTIME)) for path in FILES])
def test_the_syntax_is_that_of_python_3_8(path: Path) -> None:
    ast.parse(path.read_bytes(), feature_version=(3, 8))


@pytest.mark.parametrize("folder", sorted({path.parent for path in FLAT}), ids=lambda folder: folder.name)
def test_python_3_8_imports_the_modules_by_their_flat_names(folder: Path) -> None:
    """In isolated mode, so that neither PYTHONPATH nor the current folder offers the package."""
    interpreters = [*Path.home().glob(".pyenv/versions/3.8.*/bin/python"), *filter(None, [shutil.which("python3.8")])]
    if not interpreters:
        pytest.skip("there is no Python 3.8")
    names = [path.stem for path in FLAT if path.parent == folder]
    command = [str(interpreters[0]), "-I", "-B", "-c", _IMPORT_ALL, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
