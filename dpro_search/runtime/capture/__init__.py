"""Capture of a model's graph with fake tensors, in an environment with PyTorch."""
