"""What `pip install .` puts beside the modules: other tests use the files of the checkout."""

import json
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_installed_package_has_every_file_of_the_checkout():
    # Building leaves metadata in the checkout, too: what was installed has a record of its files.
    installed = [found for found in distributions(name="dpro-search") if found.read_text("RECORD")]
    if not installed or json.loads(installed[0].read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        pytest.skip("not installed, or in editable mode: then its files are those of the checkout")
    installed_files = {str(path) for path in installed[0].files or () if path.parts[0] == "dpro_search"}
    here = {path.relative_to(ROOT) for path in (ROOT / "dpro_search").rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path.parts and path.suffix not in {".md", ".nbi", ".nbc"}}
    assert {str(path) for path in here} - installed_files == set()
