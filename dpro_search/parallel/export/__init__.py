"""Targets of parallel jobs, one module for each framework."""
