"""What the measurements of bfloat16 in TensorFlow and in PyTorch have in common: the verb, and the processor that they need."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpro_search.costmodel.precision import PrecisionTable

INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def measure_parser(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], framework: str, models: Sequence[str]
) -> argparse.ArgumentParser:
    """The verb `measure`."""
    measure = verbs.add_parser("measure")
    measure.add_argument("--python", required=True, help=f"interpreter of the {framework} environment")
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--models", nargs="+", default=models, choices=models)
    return measure


def has_instructions() -> bool:
    """Whether this processor computes in bfloat16; prints that it does not."""
    flags = Path("/proc/cpuinfo").read_text().split()
    found = any(name in flags for name in INSTRUCTIONS)
    if not found:
        print(f"skipped: this processor has none of {', '.join(INSTRUCTIONS)}; bfloat16 would be emulated", file=sys.stderr)
    return found


def save_table(table: PrecisionTable, path: Path) -> None:
    """Write a table and say what it holds."""
    table.save(path)
    size = path.stat().st_size / 1e3
    print(f"{path}: {len(table.rows)} ops, {len(table.casts)} casts of {len(table.workloads)} models, {size:.0f} KB")
