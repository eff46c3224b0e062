"""What the drift gate watches: predictions for the bundled sample, and for every real trace that may lie beside the repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpro_search import Recording, load
from dpro_search.collect.readers.importers import import_trace
from dpro_search.errors import DproSearchError

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"

# What is asked about the sample: a setting of each term of the model.
SAMPLE_CHANGES: Mapping[str, Mapping[str, object]] = {
    "as recorded": {},
    "no fusion": {"fusion_threshold_bytes": 0},
    "4 groups": {"groups": 4},
    "long cycle": {"cycle_time_us": 20_000},
    "slow link": {"rate": "500mbit"},
    "fast link": {"rate": "unlimited"},
    "8 ranks": {"ranks": 8},
}

# The files of each job in shared/traces. What is no recording at all is in NO_JOBS: together they are the whole folder.
JOBS = {
    "kineto_dlrm_8ranks": ("kineto_dlrm_8ranks",),
    "convnet_v100": ("kineto_single/convnet_v100_ns_timestamps.json.gz",),
    "ddp_resnet50_a100": ("kineto_single/ddp_resnet50_a100_rank0of2.json.gz",),
    "resnet50_v100_workers0": ("kineto_single/resnet50_v100_workers0.json.gz",),
    "resnet50_v100_workers4": ("kineto_single/resnet50_v100_workers4.json.gz",),
    "torchrec_a100": ("kineto_single/torchrec_a100_rank3of8.json.gz",),
    "stragglers": ("stragglers/trace-ST.parquet",),
    "byteps_mxnet_2x2": ("byteps_mxnet_2x2",),
    "mxnet_kvstore": tuple(
        f"mxnet_kvstore/{name}" for name in ("worker0.json.gz", "worker1.json.gz", "server0.json.gz", "symbol.json")
    ),
    "horovod_mpi": ("mxnet_kvstore/horovod_mpi_timeline.json.gz",),
    "chakra": ("other_formats/chakra.0.et.gz",),
    "jax_8_gpus": ("other_formats/jax_conv_8xMI300X.xplane.pb",),
    "full_trace": tuple(f"tensorflow_horovod_2/rank{rank}.v1_session_full_trace.pb.gz" for rank in (0, 1)),
    "horovod_timeline": ("tensorflow_horovod_2/rank0.horovod_timeline.json.gz",),
    **{
        f"horovod_{name}": (f"tensorflow_horovod_2/timeline_{name}.json.gz",)
        for name in ("cycle50", "default", "fusion0", "fusion1MB", "groups4_nofuse")
    },
}
NO_JOBS = (
    "README.md",
    "kineto_single/LICENSE.hta",
    "kineto_single/LICENSE.kineto",
    *(
        f"stragglers/{name}" for name in ("LICENSE", "meta-ST.yaml", "result-ST.json", "timeline-ST.json.gz")
    ),  # the publisher's replay
    "tables",  # measured times, without events
    *(
        f"tensorflow_horovod_2/rank{rank}.{name}.pb.gz" for rank in (0, 1) for name in ("run_metadata", "xplane")
    ),  # parts of a recording
)


@dataclass(frozen=True)
class Case:
    """One snapshotted prediction: its name, whether it is of the shared traces, and how to get it."""

    name: str
    shared: bool
    predict: Callable[[], dict[str, Any]]


def cases() -> Iterator[Case]:
    """All of them; those of the shared traces only where these are."""
    for name, changes in SAMPLE_CHANGES.items():
        yield Case(f"sample: {name}", False, lambda changes=changes: predicted(load(sample="resnet50_2ranks_2gbit"), changes))
    if SHARED.is_dir():
        for name, paths in JOBS.items():
            yield Case(f"shared: {name}", True, lambda paths=paths: imported(paths))


def predicted(job: Recording, changes: Mapping[str, object]) -> dict[str, Any]:
    """Iteration time and breakdown, in us, to a tenth."""
    found = job.replay(changes=changes)
    return {
        "iteration_us": round(found.iteration_us, 1),
        "breakdown_us": {name: round(value_us, 1) for name, value_us in found.breakdown_us.items()},
    }


def imported(paths: tuple[str, ...]) -> dict[str, Any]:
    """The prediction of a job that is imported first; or which error says that it cannot be replayed."""
    trace = import_trace([SHARED / path for path in paths])
    try:
        return predicted(Recording(folder=SHARED / paths[0], source=trace), {})
    except DproSearchError as error:
        return {"refused": type(error).__name__}
