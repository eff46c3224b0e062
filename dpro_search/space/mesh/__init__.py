"""Parallel strategies of a model on a mesh of devices: how dims of ops and tensors are split, and what that makes ranks exchange.

`Strategy` names degrees (data, tensor, pipeline, context, expert parallel, ZeRO stage); `Layout` says which dims of an op are split
over which axes of the mesh; `compile_block` compares the layouts that ops need with those that tensors have, and makes of each
mismatch a collective (Duan et al., "Proteus", TPDS 2024, section 4).
"""

from dpro_search.space.mesh.block_times import BlockTimes as BlockTimes
from dpro_search.space.mesh.compile import BlockProgram as BlockProgram
from dpro_search.space.mesh.compile import Collective as Collective
from dpro_search.space.mesh.compile import LocalOp as LocalOp
from dpro_search.space.mesh.compile import compile_block as compile_block
from dpro_search.space.mesh.costs import step_costs as step_costs
from dpro_search.space.mesh.domain import Domain as Domain
from dpro_search.space.mesh.domain import domain_of as domain_of
from dpro_search.space.mesh.domain import harder as harder
from dpro_search.space.mesh.layout import Layout as Layout
from dpro_search.space.mesh.memory import PeakMemory as PeakMemory
from dpro_search.space.mesh.memory import mean_state_bytes as mean_state_bytes
from dpro_search.space.mesh.memory import peak_memory as peak_memory
from dpro_search.space.mesh.memory import rank_memories as rank_memories
from dpro_search.space.mesh.memory_rules import MemoryRules as MemoryRules
from dpro_search.space.mesh.pipeline import pipeline_orders as pipeline_orders
from dpro_search.space.mesh.runtime import CHECKED_RANK_US as CHECKED_RANK_US
from dpro_search.space.mesh.runtime import Host as Host
from dpro_search.space.mesh.runtime import Runtime as Runtime
from dpro_search.space.mesh.runtime import Selective as Selective
from dpro_search.space.mesh.scales import MEASURED as MEASURED
from dpro_search.space.mesh.scales import Scales as Scales
from dpro_search.space.mesh.schedule import Schedule as Schedule
from dpro_search.space.mesh.step_graph import StepCosts as StepCosts
from dpro_search.space.mesh.step_graph import step_graph as step_graph
from dpro_search.space.mesh.strategy import Recompute as Recompute
from dpro_search.space.mesh.strategy import Strategy as Strategy
from dpro_search.space.mesh.strategy import layout_of as layout_of
from dpro_search.space.mesh.workload import Known as Known
from dpro_search.space.mesh.workload import Workload as Workload
