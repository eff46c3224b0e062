"""Latencies of library ops on a device, from its specs, a few measurements of it and measurements of others (README.md)."""

from dpro_search.costmodel.devices.model import DeviceLatency as DeviceLatency
from dpro_search.costmodel.devices.model import LatencyModel as LatencyModel
from dpro_search.costmodel.devices.model_file import default_model as default_model
from dpro_search.costmodel.devices.ops import LibraryOpKind as LibraryOpKind
from dpro_search.costmodel.devices.ops import Ops as Ops
from dpro_search.costmodel.devices.ops import Stack as Stack
from dpro_search.costmodel.devices.ops import attention as attention
from dpro_search.costmodel.devices.ops import convolution as convolution
from dpro_search.costmodel.devices.ops import experts as experts
from dpro_search.costmodel.devices.ops import gemm as gemm
from dpro_search.costmodel.devices.ops import joined as joined
from dpro_search.costmodel.devices.ops import latent_attention as latent_attention
from dpro_search.costmodel.devices.ops import streamed as streamed
from dpro_search.costmodel.devices.profile import DeviceProfile as DeviceProfile
from dpro_search.costmodel.devices.profile import Probes as Probes
from dpro_search.costmodel.devices.profile import probe_places as probe_places
from dpro_search.costmodel.devices.profile import probes_of as probes_of
from dpro_search.costmodel.devices.sampled import latency_on as latency_on
from dpro_search.costmodel.devices.written import OpSpec as OpSpec
