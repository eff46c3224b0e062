"""Duration of an op on a GPU on which it was not measured: a roofline with the shares of peak that such ops reach."""

from dpro_search.parallel.gpu_ops.kernels import AdapterKernels as AdapterKernels
from dpro_search.parallel.gpu_ops.kernels import AttentionKernels as AttentionKernels
from dpro_search.parallel.gpu_ops.kernels import ImageLayout as ImageLayout
from dpro_search.parallel.gpu_ops.kernels import Kernels as Kernels
from dpro_search.parallel.gpu_ops.kernels import LossKernels as LossKernels
from dpro_search.parallel.gpu_ops.kernels import NormKernels as NormKernels
from dpro_search.parallel.gpu_ops.op_costs import NARROW as NARROW
from dpro_search.parallel.gpu_ops.op_costs import OpCosts as OpCosts
from dpro_search.parallel.gpu_ops.op_costs import achieved_by as achieved_by
from dpro_search.parallel.gpu_ops.op_costs import capped_clock as capped_clock
from dpro_search.parallel.gpu_ops.op_costs import expected_largest as expected_largest
from dpro_search.parallel.gpu_ops.op_costs import slowest as slowest
