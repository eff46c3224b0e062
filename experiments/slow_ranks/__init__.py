"""Measurement of `dpro-search ranks`: real PyTorch ranks on shaped hosts, of which some are made slow on purpose."""
