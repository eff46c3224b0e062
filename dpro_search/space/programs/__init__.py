"""PyTorch jobs on CPUs (DDP, FSDP) as programs of ranks that share cores with Gloo's threads, and the replay graph of a program."""
