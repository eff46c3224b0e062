"""The recordings of small real jobs in `tests/data`, and the traces that they give, each assembled once for all tests."""

import functools
import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from dpro_search.collect.assemble.byteps import assemble_byteps
from dpro_search.collect.assemble.mxnet_horovod import assemble_mxnet_horovod
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace

DATA = Path(__file__).parent / "data"
FEW_CLUSTERS = DATA / "xla_clusters_few.jsonl.gz"  # real clusters of three models, few enough to learn from in seconds


def raw_copy(name: str, folder: Path) -> Path:
    """A copy of a recording as the recorder leaves it, in a new folder `raw` of `folder`."""
    raw = shutil.copytree(DATA / name, folder / "raw")
    if name.startswith("mxnet_horovod"):
        for packed in raw.rglob("*.gz"):
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
    return raw


@functools.cache
def trace_of(name: str) -> Trace:
    """The trace of a recording."""
    if name == "kvstore_mlp":
        return Trace.load(DATA / name)
    with tempfile.TemporaryDirectory() as folder:
        return _ASSEMBLE[name.partition("_")[0]](raw_copy(name, Path(folder)))


@functools.cache
def imported(*paths: Path) -> Trace:
    """The trace of profiles and other files that `import` reads."""
    return import_trace([*paths])


_ASSEMBLE: dict[str, Callable[[Path], Trace]] = {
    "byteps": assemble_byteps,
    "ddp": assemble_torch,
    "fsdp": assemble_torch,
    "mxnet": assemble_mxnet_horovod,
}


def of_the_job(warnings: Iterable[str]) -> list[str]:
    """Warnings of a recording that are not about what else ran on the machine."""
    return [warning for warning in warnings if not warning.startswith("other processes used")]
