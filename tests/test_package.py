"""What `pip install .` puts beside the modules: other tests use the files of the checkout."""

import json
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_installed_package_has_every_file_of_the_checkout():
    installed = distribution("dpro-search")
    if json.loads(installed.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        pytest.skip("installed in editable mode: its files are those of the checkout")
    there = {str(path) for path in installed.files or () if path.parts[0] == "dpro_search"}
    here = {path.relative_to(ROOT) for path in (ROOT / "dpro_search").rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path.parts and path.suffix not in {".md", ".nbi", ".nbc"}}
    assert {str(path) for path in here} - there == set()
