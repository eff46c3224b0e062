"""`network`: networks that are no transformers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from dpro_search.parallel.model.network import Network
from dpro_search.parallel.model.recommenders import CRITEO_SMALL_ROWS, dlrm, neural_collaborative_filtering
from dpro_search.parallel.model.vision import (
    alexnet,
    efficientnet_b0,
    inception_v3,
    industrial_unet,
    mask_rcnn,
    resnet,
    retinanet,
    ssd300,
    unet,
    vgg,
    vnet,
)


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
