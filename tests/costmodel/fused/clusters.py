"""Measured clusters for tests: every tenth of the bundled table, as they were recorded in TensorFlow on one core; loaded once."""

import functools

from dpro_search.collect.tables.clusters import ClusterTable, OpCluster, bundled_table_path, read_table
from dpro_search.costmodel.fused.model_file import FusionModel

_EVERY = 10


@functools.cache
def table() -> ClusterTable:
    whole = read_table(bundled_table_path())
    return ClusterTable(header=whole.header, rows=whole.measured[::_EVERY], dropped={})


@functools.cache
def model() -> FusionModel:
    return FusionModel.train([table()])


def clusters() -> list[OpCluster]:
    return [row.cluster for row in table().measured]
