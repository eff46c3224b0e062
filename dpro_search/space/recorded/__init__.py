"""Recorded steps of a trace with streams and dependencies, as replay graphs: unchanged, edited for a plan, on another cluster."""
