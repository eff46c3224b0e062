"""Predicted against measured: parallel jobs on real ranks, and on paced ones."""
