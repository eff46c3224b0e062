"""Networks that are no transformers have the parameters and multiply-adds of public figures."""

import pytest

from dpro_search.errors import InputError
from dpro_search.parallel import NETWORKS, names
from dpro_search.parallel.model import NetworkBuilder, Tensor, model, parameters_of
from tests.every_case import every_case

PUBLIC = {  # parameters, and billions of multiply-adds of an image: torchvision 0.20's table of weights; timm for the last two
    "resnet50": (25_557_032, 4.09),
    "resnet101": (44_549_160, 7.80),
    "resnet152": (60_192_808, 11.51),
    "resnext50-32x4d": (25_028_904, 4.23),
    "vgg16": (138_357_544, 15.47),
    "vgg19": (143_667_240, 19.63),
    "alexnet": (61_100_840, 0.71),
    "efficientnet-b0": (5_288_548, 0.39),
    "inception-v3": (23_834_568, 5.71),
    "retinanet": (34_014_999, 151.54),
    "mask-rcnn": (44_401_393, None),
    "resnext101-32x4d": (44_177_704, 8.01),
    "se-resnext101-32x4d": (48_955_416, 8.02),
}

# Added up layer by layer from NVIDIA/DeepLearningExamples: UNet_Industrial/model ("tinyUNet"), VNet/model, UNet_3D_Medical/model,
# UNet_Medical/model.
EXAMPLES = {"unet-medical": 31_030_658, "unet-industrial": 1_850_305, "vnet": 3_599_747, "unet3d": 31_189_443}


def multiply_adds(network, batch=1):
    return sum(op.forward_flops(block.sizes_at(batch, 1)) for block in network.blocks for op in block.ops) / 2


@every_case(("name", "parameters", "billions"), [(name, *figures) for name, figures in PUBLIC.items()])
def test_a_network_has_its_public_parameters_and_multiply_adds(name, parameters, billions):
    model_facts = model(name)
    assert parameters_of(model_facts) == parameters
    if billions is not None:
        assert multiply_adds(model_facts) / 1e9 == pytest.approx(billions, rel=0.012)


@pytest.mark.parametrize(("name", "parameters"), EXAMPLES.items())
def test_a_segmentation_network_has_the_layers_of_its_source(name, parameters):
    assert parameters_of(model(name)) == parameters


@every_case("name", NETWORKS)
def test_ops_read_what_ops_before_them_made_and_work_grows_with_the_batch(name):
    network = model(name)
    for block in network.blocks:
        made = {""}
        for op in block.ops:
            assert made.issuperset(op.inputs), op.name
            assert op.name not in made
            made.add(op.name)
            assert made.issuperset(op.saves), op.name
        assert set(block.sizes_at(1, 1)) >= {dim for op in block.ops for dim in op.dims}
    assert multiply_adds(network, 8) == pytest.approx(8 * multiply_adds(network))


def test_dlrm_has_the_tables_of_mlperf():
    """24 billion parameters: 187,767,399 rows of 128 numbers."""
    network = model("dlrm")
    assert network.tables == 26
    assert parameters_of(network) == pytest.approx(187_767_399 * 128, rel=1e-3)


def test_a_convolution_of_groups_reduces_over_a_group():
    def weights(groups):
        net = NetworkBuilder("one")
        x = net.open("first", Tensor("", 32, (8, 8)))
        net.loss(net.conv(x, 64, 3, groups=groups))
        net.loss(net.open("second", x))
        return parameters_of(net.network())

    assert (weights(1), weights(4)) == (32 * 64 * 9, 32 * 64 * 9 / 4)


def test_extents_follow_windows_strides_and_padding():
    net = NetworkBuilder("one")
    x = net.open("first", Tensor("", 3, (224, 224)))
    assert net.conv(x, 64, 7, stride=2).extent == (112, 112)
    assert net.conv(x, 64, 3, padding=0).extent == (222, 222)
    assert net.pool(net.conv(x, 64, 7, stride=2), 3, stride=2, padding=1).extent == (56, 56)
    assert net.transposed(x, 8).extent == (448, 448)


def test_a_name_is_of_a_network_or_of_a_transformer():
    assert not set(NETWORKS) & set(names())
    with pytest.raises(InputError, match="did you mean resnet50"):
        model("resnet-50")
