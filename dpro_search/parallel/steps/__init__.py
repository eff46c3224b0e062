"""Replay graphs of a described job's step, and predicted steps of one strategy after another."""
