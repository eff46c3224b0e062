"""What the dPRO paper says: Hu et al., "dPRO: A Generic Performance Diagnosis and Optimization Toolkit for Expediting Distributed
DNN Training", MLSys 2022 (arXiv 2205.02473). Up to 128 V100 GPUs, 100 Gbit/s, batch 32 on each.
"""

SOURCE = "Hu et al., MLSys 2022 (arXiv 2205.02473)"

# Iteration in ms on 16 GPUs, of Horovod with TensorFlow, Horovod with MXNet, BytePS with TensorFlow: measured, by dPRO, by its
# Daydream.
REPLAY_MS: dict[tuple[str, str], tuple[tuple[float, float, float], ...]] = {
    ("ResNet-50", "TCP"): ((149.9, 147.7, 110.6), (129.7, 130.7, 103.9), (152.0, 144.2, 131.8)),
    ("ResNet-50", "RDMA"): ((138.6, 142.3, 109.2), (111.2, 109.5, 100.5), (116.2, 117.7, 118.4)),
    ("BERT-Base", "TCP"): ((551.8, 519.2, 355.9), (452.2, 439.7, 274.1), (545.1, 514.0, 400.5)),
    ("BERT-Base", "RDMA"): ((459.6, 453.8, 345.7), (311.3, 292.8, 270.5), (499.7, 465.1, 396.5)),
    ("VGG-16", "TCP"): ((457.3, 451.5, 136.2), (409.4, 412.7, 146.5), (431.1, 449.2, 148.3)),
    ("VGG-16", "RDMA"): ((227.0, 219.8, 139.1), (219.4, 219.9, 146.5), (232.8, 230.4, 152.2)),
    ("Inception-v3", "TCP"): ((137.4, 142.9, 100.7), (118.0, 117.2, 104.3), (134.9, 124.9, 122.3)),
    ("Inception-v3", "RDMA"): ((131.0, 138.9, 98.9), (116.3, 113.2, 101.8), (115.8, 110.9, 113.2)),
}

# Error of the replay of BERT in %, by the number of GPUs: with alignment, without.
ALIGNMENT_PCT = {8: (2.9, 5.0), 16: (3.5, 8.5), 32: (3.0, 13.1), 64: (2.2, 27.9), 128: (1.7, 36.7)}

# Speed-up in %, best cases.
GAINS_PCT = {
    "op fusion": (51.8, "over XLA's default"),
    "tensor fusion and partition": (19.1, "over the default"),
    "all": (26.4, "over the default; 62.95 % over XLA's"),
}

MEMORY_ERROR_PCT = 5.25  # the largest


def replay_errors_pct() -> tuple[list[float], list[float]]:
    """Absolute errors of the table: dPRO's, and those of its Daydream."""
    rows = [row for systems in REPLAY_MS.values() for row in systems]
    found = [[abs(row[column] / row[0] - 1) * 100 for row in rows] for column in (1, 2)]
    return found[0], found[1]
