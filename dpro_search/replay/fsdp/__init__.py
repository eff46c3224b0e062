"""Replay of jobs whose model ``fully_shard`` divided: the machine is that of `replay/ddp`."""
