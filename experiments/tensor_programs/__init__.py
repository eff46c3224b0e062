"""Latency of tensor programs (loop nests with random schedules) across instruction sets and models."""
