"""``experiments.proteus``: every job is predicted with and without interference, which costs time."""

import json
from collections import Counter

import pytest

from experiments.proteus import __main__ as proteus
from experiments.proteus.cases import MODELS, clusters
from tests.in_process import called


@pytest.fixture(scope="module")
def printed():
    return json.loads(called(proteus, "--json").stdout)


def test_interference_never_makes_a_step_faster(printed):
    assert len(printed["results"]) > 80
    assert {one["model"] for one in printed["results"]} == set(MODELS)
    assert all(one["plain_ms"] <= one["full_ms"] for one in printed["results"])


def test_cards_that_are_shared_cost_most_where_there_is_one(printed):
    """Of the pipelines of GPT-2 on V100: groups of data parallel ranks share the cards, and so do sends."""
    lost = {
        one["cluster"]: one["difference_pct"]
        for one in printed["results"]
        if (one["model"], one["strategy"]) == ("GPT-2 (124M)", "pp 2 x dp 16")
    }
    assert lost["4 x 8 V100, 1 card"] < lost["4 x 8 V100, 2 cards"] < 0


def test_every_cluster_has_every_kind_of_strategy(printed):
    for cluster in clusters():
        kinds = Counter(
            kind
            for one in printed["results"]
            if one["cluster"] == cluster
            for kind in ("tp ", "pp ", "ZeRO-3", "recomputation", "tables")
            if kind in one["strategy"]
        )
        assert len(kinds) == 5, cluster


def test_orders_of_both_are_compared(printed):
    assert {(one["cluster"], one["model"]) for one in printed["orders"]} == {
        (one["cluster"], one["model"]) for one in printed["results"]
    }
    assert all(-1 <= one["kendall_tau"] <= 1 for one in printed["orders"])
