"""Replay of jobs whose model ``fully_shard`` divided: their programs are replayed by `replay/ddp`."""
