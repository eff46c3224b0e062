"""TensorBoard: a folder of event files for each plan, with its settings as hyperparameters, and the report beside them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dpro_search.deploy.trackers import TrackedSearch

_FOLDER = "runs/tensorboard"


def log(search: TrackedSearch, where: str | None) -> str:
    """Write the event files below a folder, `where` (None: ``runs/tensorboard``)."""
    folder = Path(where or _FOLDER) / search.name
    for plan in search.plans:
        writer = EventFileWriter(str(folder / plan.name))
        now_s = time.time()
        writer.add_event(Event(wall_time=now_s, summary=hparams_pb(dict(plan.parameters), trial_id=f"{search.name}/{plan.name}")))
        for name, values in plan.metrics.items():
            for step, value in enumerate(values):
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                writer.add_event(Event(wall_time=now_s, step=step, summary=summary))
        writer.close()
    shutil.copyfile(search.page, folder / "report.html")
    return f"TensorBoard, {folder}; tensorboard --logdir {folder.parent}"
