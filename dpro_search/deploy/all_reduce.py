"""`write_all_reduces`: the library of size-tuned all-reduces, with the tables of its choices, as a folder for a training job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.runtime import ALL_REDUCE

LIBRARY = "dpro_search_all_reduce"

_README = """# All-reduces by size

{tables} say which all-reduce is the fastest for which size, as measured. In a training script that runs under mpirun:

    from dpro_search_all_reduce import AllReduce                 # this folder in PYTHONPATH; needs numpy and mpi4py
    all_reduce = AllReduce(choice="{first}")
    all_reduce.sum(gradients, average=True)                      # NumPy arrays or torch tensors, in place

Under DistributedDataParallel: `from dpro_search_all_reduce.ddp import hook`, then
`model.register_comm_hook(None, hook(all_reduce))`.
"""


def write_all_reduces(folder: Path, tables: Mapping[float | None, Mapping[str, Any]]) -> list[Path]:
    """Write the library and its tables, one for each rate of the links; returns what was written."""
    library_files = []
    names = []
    for rate_bps, table in tables.items():
        names.append("all_reduces.json" if rate_bps is None else f"all_reduces_{rate_bps / 1e6:g}mbit.json")
        write_file(folder / names[-1], msgspec.json.format(msgspec.json.encode(table)))
    for source in sorted((ALL_REDUCE / LIBRARY).glob("*.py")):
        write_file(folder / LIBRARY / source.name, source.read_bytes())
        library_files.append(folder / LIBRARY / source.name)
    listed = " and ".join(f"`{name}`" for name in names)
    write_file(folder / "README.md", _README.format(tables=listed, first=names[0]).encode())
    return [*(folder / name for name in names), *library_files, folder / "README.md"]
