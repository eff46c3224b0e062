"""``experiments.proteus``: every job is predicted with and without interference, which costs time."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from experiments.proteus.cases import MODELS, clusters

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.proteus", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_interference_never_makes_a_step_faster(found):
    assert len(found["results"]) > 80
    assert {one["model"] for one in found["results"]} == set(MODELS)
    assert all(one["plain_ms"] <= one["full_ms"] for one in found["results"])


def test_cards_that_are_shared_cost_most_where_there_is_one(found):
    """Of the pipelines of GPT-2 on V100: groups of data parallel ranks share the cards, and so do sends."""
    lost = {
        one["cluster"]: one["difference_pct"]
        for one in found["results"]
        if (one["model"], one["strategy"]) == ("GPT-2 (124M)", "pp 2 x dp 16")
    }
    assert lost["4 x 8 V100, 1 card"] < lost["4 x 8 V100, 2 cards"] < 0


def test_every_cluster_has_every_kind_of_strategy(found):
    for cluster in clusters():
        kinds = Counter(
            kind
            for one in found["results"]
            if one["cluster"] == cluster
            for kind in ("tp ", "pp ", "ZeRO-3", "recomputation", "tables")
            if kind in one["strategy"]
        )
        assert len(kinds) == 5, cluster


def test_orders_of_both_are_compared(found):
    assert {(one["cluster"], one["model"]) for one in found["orders"]} == {
        (one["cluster"], one["model"]) for one in found["results"]
    }
    assert all(-1 <= one["kendall_tau"] <= 1 for one in found["orders"])
