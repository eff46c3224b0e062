"""A model as its architecture describes it: ops with named dims, before anybody decides how they are split over devices.

`Architecture` holds the numbers that a published configuration gives; `blocks_of` makes its blocks, each a list of `Op`.
"""

from dpro_search.parallel.model.adapters import TARGETS as TARGETS
from dpro_search.parallel.model.adapters import check_targets as check_targets
from dpro_search.parallel.model.architecture import Adapters as Adapters
from dpro_search.parallel.model.architecture import Architecture as Architecture
from dpro_search.parallel.model.architecture import Attention as Attention
from dpro_search.parallel.model.architecture import Experts as Experts
from dpro_search.parallel.model.architecture import FeedForward as FeedForward
from dpro_search.parallel.model.architecture import Layer as Layer
from dpro_search.parallel.model.architecture import Positions as Positions
from dpro_search.parallel.model.block import Block as Block
from dpro_search.parallel.model.captured import TENSOR_DIM as TENSOR_DIM
from dpro_search.parallel.model.captured import CapturedModel as CapturedModel
from dpro_search.parallel.model.huggingface import from_config as from_config
from dpro_search.parallel.model.model import Model as Model
from dpro_search.parallel.model.model import blocks_of as blocks_of
from dpro_search.parallel.model.model import parameters_of as parameters_of
from dpro_search.parallel.model.network import Network as Network
from dpro_search.parallel.model.network import NetworkBuilder as NetworkBuilder
from dpro_search.parallel.model.network import Tensor as Tensor
from dpro_search.parallel.model.networks import NETWORKS as NETWORKS
from dpro_search.parallel.model.op import Op as Op
from dpro_search.parallel.model.op import OpType as OpType
from dpro_search.parallel.model.op import Shape as Shape
from dpro_search.parallel.model.op import elements as elements
from dpro_search.parallel.model.published import model as model
from dpro_search.parallel.model.published import names as names
from dpro_search.parallel.model.published import published as published
