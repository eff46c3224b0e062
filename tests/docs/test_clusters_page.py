"""The table of bundled machines equals the data, and the example of docs/clusters.md is a cluster."""

import re
from pathlib import Path

import pytest

from dpro_search.cluster import bundled, parse_cluster
from dpro_search.cluster.files import load_cluster
from scripts.make_cluster_tables import PAGE, page
from tests.every_case import every_case

TABLE = PAGE.read_text()
TEXT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def test_the_tables_are_current():
    assert page(TABLE) == TABLE, "write them again: python scripts/make_cluster_tables.py"


@pytest.mark.parametrize("kind", ["machine"])
def test_everything_bundled_is_listed(kind: str):
    assert [name for name in bundled.names(kind) if f"`{name}` (" not in TABLE] == []


def test_the_example_file_is_a_cluster(tmp_path: Path):
    (tmp_path / "my.toml").write_text(re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)[1])
    cluster = load_cluster(tmp_path / "my.toml", bundled.find)
    assert (cluster.hosts, cluster.rate_bps, cluster.groups[0].host.device.memory_bytes) == (16, 1600e9, 96 * 2**30)
    assert cluster.provenance.of("nic.rate") == "our cluster, measured in 2026"


@every_case("name", re.findall(r"^\| `([^`]*\d?x?[^`]*)` \| ", TEXT[: TEXT.index("## Files")], re.MULTILINE))
def test_the_names_of_the_first_table_are_clusters(name: str):
    assert parse_cluster(name).ranks >= 1
