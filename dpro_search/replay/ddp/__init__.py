"""Replay of PyTorch DistributedDataParallel jobs whose ranks share a core with Gloo's threads."""
