"""A timeline as a table: a row an op and iteration."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect._files import write_file
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.path.slack import slack_us
from dpro_search.replay.timeline import Timeline


def table(timeline: Timeline) -> dict[str, npt.NDArray[Any]]:
    """Columns, [iterations * n] each; op and iteration say which op of the graph it is in which iteration.

    ``queue_us`` is the time in the device's queue, ``wait_us`` that for the other ranks of a collective, ``work_us`` the rest until
    the end; ``slack_us`` is that of `slack.py`.
    """
    graph, times, iterations = timeline.graph, timeline.times, timeline.iterations
    names = np.array([graph.name(op) for op in range(len(graph))], object)
    devices = np.array([graph.device_name(device) for device in range(graph.devices)], object)
    kinds = np.array([kind.name for kind in OpKind], object)
    of_graph: dict[str, npt.NDArray[Any]] = {
        "op": np.arange(len(graph)),
        "name": names,
        "rank": graph.rank_of_op,
        "device": devices[graph.device],
        "kind": kinds[graph.op_kind],
    }
    return {name: np.tile(column, iterations) for name, column in of_graph.items()} | {
        "iteration": np.repeat(np.arange(iterations), len(graph)),
        "ready_us": times.ready_us,
        "start_us": times.start_us,
        "moved_us": times.moved_us,
        "end_us": times.end_us,
        "queue_us": times.start_us - times.ready_us,
        "wait_us": times.moved_us - times.start_us,
        "work_us": times.end_us - times.moved_us,
        "slack_us": slack_us(timeline),
    }


def write_csv(timeline: Timeline, path: Path) -> None:
    """Write the `table` as CSV (RFC 4180, UTF-8) with a header.

    Raises `MissingCapabilityError` if the disk cannot take it; an older file is then untouched.
    """
    columns = table(timeline)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    write_file(path, text.getvalue().encode("utf-8", "backslashreplace"))
