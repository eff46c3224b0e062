"""Latencies of library ops on devices and in models that were left out: ``python -m experiments.devices score FOLDER``."""
