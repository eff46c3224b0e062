"""Programs that XLA compiled, read from their HLO text: instructions in the order in which a device runs them.

``read_hlo(path).module`` is the program. Neither XLA nor JAX is needed. The format, and what the compilers for CPUs, TPUs and GPUs
print differently, is described in ``collect/readers/README.md``.
"""

from dpro_search.collect.readers.xla.communication import (
    COLLECTIVES,
    AsyncOperation,
    Collective,
    HostTransfer,
    async_operations,
    collectives,
    host_transfers,
    scheduled_computations,
)
from dpro_search.collect.readers.xla.groups import ReplicaGroups, parse_replica_groups, parse_source_target_pairs
from dpro_search.collect.readers.xla.hlo import Alias, HloComputation, HloInstruction, HloModule, SourceLine
from dpro_search.collect.readers.xla.shapes import HOST_MEMORY_SPACE, HloShape, parse_shape
from dpro_search.collect.readers.xla.text import HloProgram, parse_hlo, read_hlo

__all__ = [
    "COLLECTIVES",
    "HOST_MEMORY_SPACE",
    "Alias",
    "AsyncOperation",
    "Collective",
    "HloComputation",
    "HloInstruction",
    "HloModule",
    "HloProgram",
    "HloShape",
    "HostTransfer",
    "ReplicaGroups",
    "SourceLine",
    "async_operations",
    "collectives",
    "host_transfers",
    "parse_hlo",
    "parse_replica_groups",
    "parse_shape",
    "parse_source_target_pairs",
    "read_hlo",
    "scheduled_computations",
]
