"""docs/formats.md and the page of traces that it links to name everything that the files have."""

import dataclasses
from pathlib import Path

import pytest

from dpro_search.collect.trace import DependencyKind, EventKind, Events, Steps, TraceMeta
from dpro_search.space.plan import setting_names
from tests.faults.processes import SEARCH
from tests.in_process import succeeds

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text()
WRITTEN = PAGE[PAGE.index("## Files that dpro-search writes") :] + (ROOT / "dpro_search" / "collect" / "README.md").read_text()


@pytest.mark.parametrize(
    "names",
    [
        TraceMeta.__struct_fields__,
        (*setting_names(), "scheme"),
        [column.name for kind in (Events, Steps) for column in dataclasses.fields(kind)],
    ],
    ids=["meta.json", "plan", "trace.npz"],
)
def test_every_field_is_named(names):
    assert [name for name in names if f"`{name}`" not in WRITTEN] == []


def test_every_kind_is_named():
    assert [kind.name for kind in (*EventKind, *DependencyKind) if kind.name not in WRITTEN] == []


def test_every_file_of_a_run_is_named(tmp_path):
    succeeds(*SEARCH, 20, "--out", tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert files >= {"run.json", "trials.jsonl", "result.json", "topn.csv"}
    assert [name for name in files if f"`{name}`" not in WRITTEN] == []
