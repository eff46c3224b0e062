"""Recommendation models: embedding tables, small dense layers, and products of features."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.parallel.model.network import Network, NetworkBuilder, Tensor

CRITEO_TABLES, CRITEO_ROWS = 26, 187_767_399
"""Rows of the tables of the Criteo 1 TB data set with at most 40 million rows a table (MLPerf training, recommendation)."""
CRITEO_SMALL_ROWS = 32_709_138
"""Rows of the tables of that data set without values that occur less than 15 times (criteo_t15 in DeepLearningExamples)."""
CRITEO_NUMBERS = 13


def _layers(net: NetworkBuilder, x: Tensor, widths: Sequence[int], last: bool = True) -> Tensor:
    for place, width in enumerate(widths):
        x = net.linear(x, width)
        if last or place < len(widths) - 1:
            x = net.activation(x)
    return x


def dlrm(
    name: str = "dlrm",
    *,
    tables: int = CRITEO_TABLES,
    rows: int = CRITEO_ROWS,
    width: int = 128,
    numbers: int = CRITEO_NUMBERS,
    bottom: Sequence[int] = (512, 256, 128),
    top: Sequence[int] = (1024, 1024, 512, 256, 1),
    lookups: float = 1.0,
    cross_rank: int = 0,
    cross_layers: int = 3,
) -> Network:
    """Naumov et al. 2019 with MLPerf's sizes; with a `cross_rank`, low-rank cross layers for products (DCN-v2, Wang et al. 2021).

    `rows` is of all tables together; `lookups` are rows of a table that a sample reads.
    """
    net = NetworkBuilder(name)
    dense = _layers(net, net.open("bottom", Tensor("", numbers, (1,))), bottom)
    found = net.shared_tables(tables, round(rows / tables), width, lookups=lookups)
    vectors = tables + 1
    joined = net.joined(dense, found)
    x = net.open("top", joined)
    if cross_rank:
        for _ in range(cross_layers):
            x = net.add(x, net.linear(net.linear(x, cross_rank, bias=False), vectors * width))
    else:
        pairs = vectors * (vectors - 1) // 2
        x = net.product(x, vectors, width, pairs + width)
    net.loss(_layers(net, x, top, last=False))
    return net.network()


def neural_collaborative_filtering(
    name: str = "ncf",
    *,
    users: int = 138_493,
    items: int = 26_744,
    factors: int = 64,
    widths: Sequence[int] = (256, 256, 128, 64),
) -> Network:
    """He et al. 2017 on MovieLens 20M: factors of users and items multiplied, and joined through dense layers."""
    net = NetworkBuilder(name)
    net.open("tables", Tensor("", 2, (1,)))
    user, item = net.table(users, factors), net.table(items, factors)
    multiplied = net.add(user, item)
    joined = net.joined(net.table(users, widths[0] // 2), net.table(items, widths[0] // 2))
    x = net.open("head", joined)
    x = _layers(net, x, widths[1:])
    net.loss(net.linear(net.joined(Tensor("", x.channels, x.extent), multiplied), 1))
    return net.network()
