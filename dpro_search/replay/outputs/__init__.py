"""A timeline for other programs: Perfetto, tables, networkx."""

from dpro_search.replay.outputs.networkx_view import to_networkx
from dpro_search.replay.outputs.perfetto import MeasuredOps, PredictedOps, measured_ops, perfetto_json
from dpro_search.replay.outputs.table import table, write_csv

__all__ = ["MeasuredOps", "PredictedOps", "measured_ops", "perfetto_json", "table", "to_networkx", "write_csv"]
