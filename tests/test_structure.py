"""The package's imports run one way: down the layers of `pyproject.toml`, and never in a circle.

Import-linter sees what a module imports when it is loaded. Here all imports count, also those inside functions and under
TYPE_CHECKING: what two modules need of each other belongs in a third, whenever it is imported.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "dpro_search"
NEEDED_EVERYWHERE = ("errors", "_compiled", "_regular_files", "_repr", "_text", "_version", "quantities")  # on every layer
GROUND = {f"{PACKAGE}.{name}" for name in NEEDED_EVERYWHERE}
# Parts of the highest layer.
BESIDE_API = {f"{PACKAGE}._api_{name}" for name in ("errors", "recording", "run", "values", "views")}

# Circles that are still to be removed. Delete an entry with its circle; add none.
KNOWN_CIRCLES: tuple[set[str], ...] = ()


class Import(NamedTuple):
    """One module needs another, for the first time in this line."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_files(root: Path, package: str) -> dict[str, Path]:
    """The file of each module; a package is its `__init__.py`."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(files: Mapping[str, Path]) -> list[Import]:
    """All imports among the modules, each pair of modules once."""
    found: dict[tuple[str, str], Import] = {}
    for importer, path in files.items():
        for name, line in named_in(path, importer):
            for imported in loaded_with(name, importer, files):
                found.setdefault((importer, imported), Import(importer, imported, line))
    return list(found.values())


def named_in(path: Path, module: str) -> Iterator[tuple[str, int]]:
    """Every name that a file imports, in full, wherever the import stands, with its line."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def loaded_with(name: str, importer: str, files: Mapping[str, Path]) -> Iterator[str]:
    """Modules that an imported name needs: its own, and the packages around it that the importer is not in itself."""
    parts = name.split(".")
    around = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    modules = [module for module in around if module in files]
    for module in modules:
        if module != importer and (module == modules[-1] or not f"{importer}.".startswith(f"{module}.")):
            yield module


def circles(imports: list[Import]) -> list[set[str]]:
    """Modules that need each other, directly or not: the strongly connected parts of two or more."""
    needs: dict[str, set[str]] = {}
    needed_by: dict[str, set[str]] = {}
    for importer, imported, _ in imports:
        needs.setdefault(importer, set()).add(imported)
        needed_by.setdefault(imported, set()).add(importer)
    collected: list[set[str]] = []
    for module in sorted(needs):
        if not any(module in circle for circle in collected):
            circle = reached(module, needs) & reached(module, needed_by)
            if len(circle) > 1:
                collected.append(circle)
    return collected


def reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen, left = {start}, [start]
    while left:
        new = edges.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def upward(imports: list[Import], layers: list[set[str]], ignored: set[str]) -> list[Import]:
    """Imports of a higher layer, the highest being layer 0; the package itself, which all load first, is on the lowest."""

    def layer(module: str) -> int:
        if "." not in module:
            return len(layers) - 1
        places = (place for place, names in enumerate(layers) for name in names if f"{module}.".startswith(f"{name}."))
        return next(places, 0)

    return [
        one for one in imports if layer(one.imported) < layer(one.importer) and f"{one.importer} -> {one.imported}" not in ignored
    ]


def contract() -> tuple[list[set[str]], set[str]]:
    """Layers from the highest to the ground floor, and what import-linter ignores as well."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layers_contract = next(one for one in settings["contracts"] if one["type"] == "layers")
    layers = [set(re.findall(r"[\w.]+", layer)) for layer in layers_contract["layers"]]  # "a | b": two on one layer
    return [layers[0] | BESIDE_API, *layers[1:], GROUND], set(layers_contract.get("ignore_imports", ()))


def listed(imports: list[Import]) -> str:
    return "\n".join(f"  {one}" for one in sorted(imports))


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    return module_files(ROOT, PACKAGE)


@pytest.fixture(scope="module")
def imports(files: dict[str, Path]) -> list[Import]:
    return imports_of(files)


def test_every_module_is_in_a_layer(files: dict[str, Path]) -> None:
    known = {PACKAGE}.union(*contract()[0])
    outside = [module for module in files if not known & {module, ".".join(module.split(".")[:2])}]
    assert not outside, f"in no layer of pyproject.toml: {', '.join(outside)}"


def test_no_import_runs_against_the_layers(imports: list[Import]) -> None:
    found = upward(imports, *contract())
    assert not found, f"imports of a higher layer:\n{listed(found)}"


def test_the_ground_floor_needs_nothing_but_the_errors(imports: list[Import]) -> None:
    found = [one for one in imports if one.importer in GROUND and one.imported != f"{PACKAGE}.errors"]
    found += [one for one in imports if one.importer == f"{PACKAGE}.errors"]
    assert not found, f"imports of the ground floor:\n{listed(found)}"


def test_no_modules_need_each_other(imports: list[Import]) -> None:
    new = [circle for circle in circles(imports) if not any(circle <= known for known in KNOWN_CIRCLES)]
    texts = [listed([one for one in imports if {one.importer, one.imported} <= circle]) for circle in new]
    assert not new, "modules that import each other:\n" + "\n\n".join(texts)


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Path]:
    """A package of two layers, `high` above `low`, in which each rule is broken once."""
    sources = {
        "__init__": "",
        "low/__init__": "",
        "low/one": "def late():\n    from p.high import top\n",
        "low/two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.low.three import Kind\n",
        "low/three": "from .two import other\n",
        "high/__init__": "from p.high.top import name\n",
        "high/top": "import p.low.one\n",
    }
    for name, text in sources.items():
        path = tmp_path / "p" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return module_files(tmp_path, "p")


def test_an_import_inside_a_function_is_seen(small: dict[str, Path]) -> None:
    violations = upward(imports_of(small), [{"p.high"}, {"p.low"}], set())
    assert ("p.low.one", "p.high.top", 2) in violations
    assert {one.importer for one in violations} == {"p.low.one"}


def test_a_package_is_loaded_with_what_is_in_it(small: dict[str, Path]) -> None:
    assert ("p.low.one", "p.high", 2) in imports_of(small)


def test_circles_through_type_checking_and_relative_imports_are_seen(small: dict[str, Path]) -> None:
    assert circles(imports_of(small)) == [{"p.high", "p.high.top", "p.low.one"}, {"p.low.two", "p.low.three"}]
