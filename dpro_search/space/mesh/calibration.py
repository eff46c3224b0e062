"""`Calibration`: what measured steps of a cluster and framework say of the cost models' constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """By what factor parts of a step take longer than the cost models say; 1: as long."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0  # Memory-bound ops, losses, updates.
    inside: float = 1.0  # Collectives within a host.
    between: float = 1.0  # Collectives between hosts.
    host: float = 1.0
    # Of the host, for each rank of a tensor parallel collective, while pipeline stages send over the network.
    send_rank_us: float = 0.0
