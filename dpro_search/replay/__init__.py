"""Replays a job's graph: how long an iteration takes, as recorded or under a plan."""

from dpro_search.replay.predictor import Predictor
from dpro_search.replay.timeline import Timeline, replay

__all__ = ["Predictor", "Timeline", "replay"]
