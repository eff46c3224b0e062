"""How often the parts of a compiled program run, and how much they compute and move."""

from dpro_search.graph.hlo.executions import executions, trip_count
from dpro_search.graph.hlo.work import HloWork, instruction_work, program_work

__all__ = ["HloWork", "executions", "instruction_work", "program_work", "trip_count"]
