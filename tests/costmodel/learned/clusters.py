"""Measured clusters for tests: a real table, recorded with a forced XLA cluster in TensorFlow 2.15 on one core, loaded once."""

import functools
from pathlib import Path

from dpro_search.collect.clusters.table import Cluster, ClusterTable, read_table
from dpro_search.costmodel.learned.model_file import FusionModel

TABLE = Path(__file__).resolve().parents[2] / "data" / "xla_clusters.jsonl.gz"


@functools.cache
def table() -> ClusterTable:
    return read_table(TABLE)


@functools.cache
def model() -> FusionModel:
    return FusionModel.train([table()])


def clusters() -> list[Cluster]:
    return [row.cluster for row in table().measured]
