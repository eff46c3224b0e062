"""Contents that the programs of `tests/integration/xla_programs_job.py` must have, as follows from the programs themselves.

The mesh is x = 4 by y = 2 of eight devices: device x * 2 + y. Sizes are those of one device.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from dpro_search.collect.readers.xla import HloModule, collectives, read_hlo
from dpro_search.graph.hlo import executions

DATA = Path(__file__).parents[2] / "data" / "xla"
TARGETS = ("cpu", "v5e_2x4", "tpu7x_2x2x1", "h100_1x1x8")
LAYERS, WIDTH = 6, 512

DEVICES = np.arange(8).reshape(4, 2)
ALONG_X, ALONG_Y = DEVICES.T.tolist(), DEVICES.tolist()
ALL = [DEVICES.reshape(-1).tolist()]
F32, BF16 = 4, 2

# Kind, bytes in, bytes out, groups, and how often it runs.
Known = tuple[str, int, int, str, int]


def module(program: str, target: str) -> HloModule:
    return read_hlo(DATA / f"{program}.{target}.hlo.gz").module


def facts(program: str, target: str) -> dict:
    return json.loads((DATA / f"{program}.{target}.json").read_text())


def names() -> list[tuple[str, str]]:
    """Each program with each target for which it was compiled."""
    return [tuple(path.name.split(".")[:2]) for path in sorted(DATA.glob("*.hlo.gz"))]


def known_collectives(program: str, target: str) -> Counter[Known]:
    # XLA's CPU compiler communicates bf16 as f32.
    half = F32 if target == "cpu" else BF16
    if program == "collectives":
        return Counter(
            [
                ("all-reduce", 128 * 256 * F32, 128 * 256 * F32, str(ALONG_X), 1),
                ("all-gather", 64 * 512 * half, 2 * 64 * 512 * half, str(ALONG_Y), 1),
                ("reduce-scatter", 256 * 512 * F32, 64 * 512 * F32, str(ALONG_X), 1),
                ("collective-permute", 128 * 384 * half, 128 * 384 * half, str(ring_along_x()), 1),
                ("all-to-all", 64 * 256 * F32, 64 * 256 * F32, str(ALONG_Y), 1),
            ]
        )
    if program == "scan":
        part, whole = WIDTH // 4 * WIDTH * F32, WIDTH * WIDTH * F32
        return Counter(
            [
                ("all-gather", part, whole, str(ALONG_X), LAYERS),
                ("reduce-scatter", whole, part, str(ALONG_X), LAYERS),
                ("all-reduce", LAYERS * part, LAYERS * part, str(ALONG_Y), 1),
                ("all-reduce", F32, F32, str(ALL), 1),
            ]
        )
    if program == "prefetch":
        part = 4096 // 4 * 4096 * half
        return Counter([("all-gather", part, 4 * part, str(ALONG_X), 4), ("all-reduce", F32, F32, str(ALL), 1)])
    if program == "ragged":
        return Counter([("ragged-all-to-all", 128 * 256 * F32, 128 * 256 * F32, str(ALONG_X), 1)])
    raise KeyError(program)


def ring_along_x() -> list[list[int]]:
    return sorted([int(DEVICES[x, y]), int(DEVICES[(x + 1) % 4, y])] for x in range(4) for y in range(2))


def read_collectives(program: HloModule) -> Counter[Known]:
    """The same of a program that was read: a loop that the compiler unrolled in part has its turns added up."""
    times = executions(program)
    runs: Counter[tuple[str, int, int, str]] = Counter()
    for one in collectives(program):
        members = sorted(one.pairs.tolist()) if one.pairs is not None else one.device_groups.tolist()
        runs[one.kind, one.operand_bytes, one.output_bytes, str(members)] += times[one.computation.name]
    return Counter([(*one, count) for one, count in runs.items()])
