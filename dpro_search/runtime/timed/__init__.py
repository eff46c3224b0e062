"""Observers of the jobs of `validate` and `fit`: losses, times of blocks, and jobs that keep a given pace."""
