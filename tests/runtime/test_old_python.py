"""The code inside jobs runs on Python 3.8; but for the recorder and synchronisation schemes, without the package."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpro_search.runtime
from tests.every_case import every_case

RUNTIME = Path(dpro_search.runtime.__file__).parent
FILES = sorted(RUNTIME.rglob("*.py"))
IN_PACKAGE = {"record", "schemes", "synchronisation"}  # folders whose modules a job imports as parts of the package
FLAT = sorted({path.relative_to(RUNTIME).parts[0] for path in FILES if path.parent != RUNTIME} - IN_PACKAGE)
# Imports modules by their names, and prints what went wrong; frameworks may be missing.
_IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        frameworks = ("torch", "tensorflow", "mxnet", "horovod", "transformers", "lightning", "accelerate")
        if error.name.split(".")[0] not in (*frameworks, "numpy", "mpi4py", "ray"):
            print(name, error)
    except Exception as error:
        print(name, error)
"""


def imported_by_python_3_8(root: Path, folders: list[Path]) -> str:
    """Errors of Python 3.8 that imports the modules of folders, in isolated mode: only `root` is on its path."""
    interpreters = [*Path.home().glob(".pyenv/versions/3.8.*/bin/python"), *filter(None, [shutil.which("python3.8")])]
    if not interpreters:
        pytest.skip("there is no Python 3.8")
    files = [path for folder in folders for path in folder.rglob("*.py") if path.stem not in ("__init__", "sitecustomize")]
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in files]
    command = [str(interpreters[0]), "-I", "-B", "-c", _IMPORT_ALL, str(root), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@every_case("path", FILES, ids=[str(path.relative_to(RUNTIME)) for path in FILES])
def test_the_syntax_is_that_of_python_3_8(path: Path) -> None:
    ast.parse(path.read_bytes(), feature_version=(3, 8))


@pytest.mark.parametrize("folder", FLAT)
def test_python_3_8_imports_the_modules_by_their_flat_names(folder: str) -> None:
    assert imported_by_python_3_8(RUNTIME / folder, [RUNTIME / folder]) == ""


def test_python_3_8_imports_the_others_from_the_package() -> None:
    assert imported_by_python_3_8(RUNTIME.parents[1], [RUNTIME / folder for folder in sorted(IN_PACKAGE)]) == ""


@pytest.mark.parametrize("order", [("timed", "hooks"), ("hooks", "timed")])
def test_each_module_that_python_runs_at_its_start_runs_the_next_one_once(order, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('the user')")
    path = os.pathsep.join([*(str(RUNTIME / name) for name in order), str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", ""], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("the user\n", "")
