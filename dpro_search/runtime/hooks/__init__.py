"""Recorders that enter a training job at its start, because their folder is on its PYTHONPATH."""
