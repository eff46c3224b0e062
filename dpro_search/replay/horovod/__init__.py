"""Replays Horovod jobs on processors that their ranks share: the runtime as a state machine, compute as a fluid."""
