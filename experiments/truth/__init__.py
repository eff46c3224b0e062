"""Predictions of published training runs beside what was measured: ``python -m experiments.truth score FOLDER``."""
