"""`network`: networks that are no transformers, by name; recommendation models (embedding tables, dense layers) are built here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from dpro_search.parallel.model.network import Network, NetworkBuilder, Tensor
from dpro_search.parallel.model.vision import (
    alexnet,
    efficientnet_b0,
    inception_v3,
    industrial_unet,
    mask_rcnn,
    medical_unet,
    resnet,
    retinanet,
    ssd300,
    unet,
    vgg,
    vnet,
)

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
    looked_up = net.shared_tables(tables, round(rows / tables), width, lookups=lookups)
    vectors = tables + 1
    joined = net.joined(dense, looked_up)
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


def _nnunet(name: str, extent: tuple[int, ...], channels: tuple[int, ...]) -> Network:
    return unet(name, extent, channels, inputs=4, classes=4, instances=True, supervised=2)


NETWORKS: Mapping[str, Callable[[], Network]] = {
    "resnet50": lambda: resnet("resnet50"),
    "resnet101": lambda: resnet("resnet101", (3, 4, 23, 3)),
    "resnet152": lambda: resnet("resnet152", (3, 8, 36, 3)),
    "resnext50-32x4d": lambda: resnet("resnext50-32x4d", groups=32, width=4),
    "resnext101-32x4d": lambda: resnet("resnext101-32x4d", (3, 4, 23, 3), groups=32, width=4),
    "se-resnext101-32x4d": lambda: resnet("se-resnext101-32x4d", (3, 4, 23, 3), groups=32, width=4, squeezed=True),
    "vgg16": lambda: vgg("vgg16", (2, 2, 3, 3, 3)),
    "vgg19": lambda: vgg("vgg19", (2, 2, 4, 4, 4)),
    "alexnet": alexnet,
    "inception-v3": inception_v3,
    "efficientnet-b0": efficientnet_b0,
    "retinanet": lambda: retinanet("retinanet"),
    # MLPerf training 2.0 and later: OpenImages' 264 classes.
    "retinanet-mlperf": lambda: retinanet("retinanet-mlperf", groups=32, width=4, classes=264),
    "mask-rcnn": mask_rcnn,
    "ssd300": ssd300,
    "unet": lambda: unet("unet", (512, 512), (64, 128, 256, 512, 1024)),
    # MLPerf training 1.0 and later: kidneys and tumours.
    "unet3d": lambda: unet("unet3d", (128, 128, 128), (32, 64, 128, 256, 320, 320), classes=3, instances=True),
    "nnunet-2d": lambda: _nnunet("nnunet-2d", (192, 160), (32, 64, 128, 256, 512, 512)),
    "nnunet-3d": lambda: _nnunet("nnunet-3d", (128, 128, 128), (32, 64, 128, 256, 320, 320)),
    "vnet": lambda: vnet("vnet"),
    "unet-medical": lambda: medical_unet("unet-medical"),
    "unet-industrial": lambda: industrial_unet("unet-industrial"),
    "dlrm": dlrm,
    "dlrm-small": lambda: dlrm("dlrm-small", rows=CRITEO_SMALL_ROWS),
    "dlrm-dcnv2-small": lambda: dlrm("dlrm-dcnv2-small", rows=CRITEO_SMALL_ROWS, lookups=1.0, cross_rank=512),
    "dlrm-dcnv2": lambda: dlrm("dlrm-dcnv2", lookups=214 / 26, cross_rank=512),
    "ncf": neural_collaborative_filtering,
}


@lru_cache(maxsize=64)
def network(name: str) -> Network:
    """A network of `NETWORKS`."""
    return NETWORKS[name]()
