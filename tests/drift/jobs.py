"""The jobs whose predictions the drift gate watches: how each is opened, and which changes of it are predicted."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dpro_search.collect.capture import read_graph
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.kinds import PlanOptions, Source, captured_text, load_source
from tests.kinds import synchronised_runs
from tests.recordings import DATA, imported, trace_of

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
CAPTURED_GRAPH = DATA / "captured" / "llama.json"

# Three descriptions of parallel jobs: dense with a pipeline, experts, and fully sharded with parts of each sequence.
JOB_FILES: Mapping[str, str] = {
    "dense": """\
model = "llama3-8b"
cluster = "2xhgx-h100"
global_batch = 64
sequence = 4096
[runs]
tp = 2
pp = 2
zero_stage = 1
""",
    "experts": """\
model = "mixtral-8x7b"
cluster = "4xhgx-h100"
global_batch = 128
sequence = 4096
precision = "bf16"
[runs]
ep = 8
pp = 2
recompute = "selective"
""",
    "sharded": """\
model = "gpt2-xl"
cluster = "1xhgx-a100"
global_batch = 64
sequence = 2048
framework = "fsdp"
[runs]
zero_stage = 3
cp = 2
micro_batch = 2
""",
}

SPEEDS = ("compute=0.5", "rank1.compute=0.8", "bandwidth=2", "bandwidth=0.5", "communication=0", "communication=1.5")
OTHER_CPU_CLUSTERS = ("ranks=8", "ranks=3", "rate=500mbit", "rate=unlimited", "ranks=4,rate=1gbit")
GPU_CLUSTERS = ("2xhgx-h100", "8xg4dn.8xlarge")
PROFILE_SPEEDS = ("compute=0.5", "rank0.compute=0.8", "communication=0", "communication=1.5")
TWO_PROFILES = ("rank1=usual", "rank1.compute=0.8", "ranks0+1.communication=0.5", "launch=0")
GPU_PROFILE_SPEEDS = (
    *("host=0.9", "rank0.host=0.9", "launch=0", "unknown=0", "compile=1", "batch=2", "bandwidth=2", "rate=1gbit"),
    *("collectives.all_reduce=0.5", "kernels.gemm=0.5", "kernels.convolution=0.5"),
)
KERNELS = tuple(f"kernels.{category}=0.5" for category in ("normalization", "layout", "optimizer"))
PARALLEL_CHANGES = (
    *("tp=1", "tp=4", "pp=1", "pp=4", "cp=1", "cp=2", "ep=4", "etp=2", "virtual_stages=2", "sequence_parallel=0"),
    *("zero_stage=0", "zero_stage=1", "zero_stage=2", "zero_stage=3", "micro_batch=1", "micro_batch=2"),
    *("recompute=none", "recompute=selective", "recompute=full", "recompute=full,recompute_layers=2"),
    *("pp=2,schedule=gpipe", "pp=2,schedule=zero-bubble", "pp=2,schedule=interleaved,virtual_stages=2"),
    *("pp=2,schedule=zero-bubble-v,virtual_stages=2", "pp=2,schedule=dual-pipe-v,virtual_stages=2"),
    *("pp=4,stage_layers=7,8,8,9", "zero_stage=3,dp_replicate=2", "zero_stage=3,reshard=0", "zero_stage=3,prefetch_layers=2"),
    *("cp=2,cp_ring=1", "cp=2,cp_balanced=0", "gradient_dtype=bf16", "gradient_dtype=fp32", "expert_load=1.2"),
    *("global_batch=32", "sequence=1024", "precision=fp8", "precision=fp32"),
    *("compute=0.5", "bandwidth=2", "communication=0", "rate=100gbit"),
)


@dataclass(frozen=True, kw_only=True)
class WatchedJob:
    """A job with the changes of it that are predicted, beside its plans."""

    name: str
    open: Callable[[], Source]
    options: PlanOptions = field(default_factory=lambda: PlanOptions(allow_lossy=True))
    changes: tuple[str, ...] = ()  # Changes as ``--set`` and ``--what-if`` take them; commas separate several at a time.
    clusters: tuple[str, ...] = ()  # Other clusters, by the names that ``--cluster`` takes.
    changes_on_clusters: tuple[str, ...] = ()  # Changes that are predicted on the first of these clusters.
    plans: bool = True  # Whether starting plans and both ends of each grid of the plan space are predicted.
    refusals: bool = False  # Whether the job may be one that cannot be replayed at all.
    is_shared: bool = False  # Whether its files lie beside the repository, where not every checkout has them.


def profiles(*names: str) -> Callable[[], Source]:
    """A function that imports profiles of tests/data."""
    return functools.partial(imported, *(DATA / name for name in names))


def _sample(name: str) -> Source:
    return Trace.load(sample_trace_path(name))


def _described(name: str) -> Source:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(JOB_FILES[name])
        return load_source(path)


def write_captured_job(folder: Path) -> Path:
    """Write the job of a captured model into a folder, and return the path of its file."""
    shutil.copy(CAPTURED_GRAPH, folder / "graph.json")
    path = folder / "job.toml"
    path.write_text(
        captured_text(read_graph(CAPTURED_GRAPH), "graph.json", "8xh100").replace("global_batch = 16", "global_batch = 64")
    )
    return path


def _captured() -> Source:
    with tempfile.TemporaryDirectory() as folder:
        return load_source(write_captured_job(Path(folder)))


def _unequal_workers() -> Source:
    with tempfile.TemporaryDirectory() as folder:
        return load_source(synchronised_runs.recording(Path(folder) / "runs.jsonl"))


def _recording(name: str, *changes: str, compute: tuple[str, ...] = (), clusters: tuple[str, ...] = ()) -> WatchedJob:
    """A job on processors that is among the recordings of tests/data."""
    return WatchedJob(
        name=name,
        open=functools.partial(trace_of, name),
        options=PlanOptions(allow_lossy=True, compute=frozenset(compute)),
        changes=(*SPEEDS, *OTHER_CPU_CLUSTERS, *changes),
        clusters=clusters,
        changes_on_clusters=("compute=0.5", "bandwidth=2", "communication=0", "ranks=4") if clusters else (),
    )


def _profile(
    name: str, open_source: Callable[[], Source], *changes: str, clusters: tuple[str, ...] = (), plans: bool = True
) -> WatchedJob:
    """A job whose ranks were profiled."""
    return WatchedJob(
        name=name,
        open=open_source,
        changes=(*PROFILE_SPEEDS, *changes),
        clusters=clusters,
        changes_on_clusters=("compute=0.5,bandwidth=2",) if clusters else (),
        plans=plans,
    )


def _local_jobs() -> list[WatchedJob]:
    horovod = ("groups=1", "groups=4", "cycle_time_us=20ms", "fusion_threshold_bytes=0", "cores=1")
    return [
        WatchedJob(
            name="resnet50_2ranks_2gbit",
            open=functools.partial(_sample, "resnet50_2ranks_2gbit"),
            options=PlanOptions(allow_lossy=True, compute=frozenset({"op-fusion", "recomputation", "accumulation"})),
            changes=(*SPEEDS, *OTHER_CPU_CLUSTERS, *horovod),
        ),
        WatchedJob(
            name="gpt_ddp_1gbit",
            open=functools.partial(_sample, "gpt_ddp_1gbit"),
            options=PlanOptions(allow_lossy=True, compute=frozenset({"recomputation"})),
            changes=(*SPEEDS, *OTHER_CPU_CLUSTERS, "bucket_cap_bytes=1MiB", "cores=1"),
            clusters=GPU_CLUSTERS,
            changes_on_clusters=("compute=0.5", "bandwidth=2", "communication=0", "ranks=4", "bucket_cap_bytes=1MiB"),
        ),
        WatchedJob(
            name="bert_kvstore_500mbit",
            open=functools.partial(_sample, "bert_kvstore_500mbit"),
            changes=(*SPEEDS, *OTHER_CPU_CLUSTERS, "p3=1", "servers=1", "servers_on_workers=1"),
        ),
        _profile(
            "resnet50_ddp_a100",
            functools.partial(_sample, "resnet50_ddp_a100"),
            *(*GPU_PROFILE_SPEEDS, *KERNELS, "measured=200ms", "ranks=4", "collectives.broadcast=0"),
            clusters=GPU_CLUSTERS,
        ),
        _recording("mxnet_horovod_mlp", *horovod[2:]),
        _recording("ddp_mlp", "cores=1", clusters=GPU_CLUSTERS),
        _recording("ddp_blocks", "cores=1", compute=("recomputation",), clusters=GPU_CLUSTERS),
        _recording("fsdp_mlp", "cores=1", clusters=GPU_CLUSTERS),
        _recording("fsdp_mlp_prefetch", "prefetch=0", "reshard_after_forward=0"),
        _recording("kvstore_mlp", "p3=1", "servers=1"),
        _recording("byteps_mlp", "partition_bytes=1MB", "servers=1", "credit=4"),
        _profile(
            "ddp_resnet50_h200",
            profiles("ddp_resnet50_h200.json.gz"),
            *("measured=55ms", "compile=1", "batch=2", "host=0.9", "kernels.gemm=0.5"),
            clusters=("h100", "a100"),
            plans=False,  # those of resnet50_ddp_a100 are of the same kind
        ),
        _profile(
            "gloo_ddp_bert",
            functools.partial(Trace.load, DATA / "gloo_ddp_bert"),
            *(*TWO_PROFILES, "collectives.all_reduce=0.5"),
            clusters=GPU_CLUSTERS,
        ),
        _profile(
            "ddp_mlp_kineto",
            profiles(*(f"ddp_mlp/rank{rank}/kineto.json.gz" for rank in (0, 1))),
            *(*TWO_PROFILES, "collectives.all_reduce=0.5"),
        ),
        _profile(
            "fsdp_mlp_kineto",
            profiles(*(f"fsdp_mlp/rank{rank}/kineto.json.gz" for rank in (0, 1))),
            *(*TWO_PROFILES, "collectives.all_gather=0.5", "collectives.reduce_scatter=0.5"),
        ),
        _profile("kineto_modules", profiles("kineto_modules/net.json.gz"), "module.Net_0.Block_0=0.5", "module.Net_0.Linear_0=0"),
        _profile(
            "inceptionv3",
            profiles("mxnet_branched/inceptionv3_threaded.json.gz"),
            "kernels.convolution=0.5",
            "kernels.optimizer=0",
            "unknown=0",
            "batch=2",
        ),
        WatchedJob(
            name="captured",
            open=_captured,
            changes=("zero_stage=0", "zero_stage=3", "compute=0.5", "bandwidth=2", "recompute=full", "global_batch=32"),
            clusters=("2xhgx-a100",),
        ),
        WatchedJob(
            name="unequal_workers",
            open=_unequal_workers,
            changes=(
                *("synchronisation=asp", "synchronisation=ssp(staleness=2)", "synchronisation=adsp(commits=2)", "ranks=4"),
                *("synchronisation=local-sgd(steps=4)", "speeds=1:2:3:4", "delay=20ms", "compute=0.5", "rank2.compute=2"),
                *("communication=3", "bandwidth=2", "target_loss=0.6"),
            ),
        ),
        *(
            WatchedJob(
                name=f"described_{name}",
                open=functools.partial(_described, name),
                changes=PARALLEL_CHANGES,
                clusters=("4xhgx-h100", "2xhgx-a100"),
                changes_on_clusters=("compute=0.5", "bandwidth=2", "tp=2"),
            )
            for name in JOB_FILES
        ),
    ]


# The files of each job in shared/traces, and the changes of it that are predicted. The files that are no recording are in
# NO_JOBS: together they are the whole folder.
SHARED_FILES: Mapping[str, tuple[str, ...]] = {
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
SHARED_CHANGES: Mapping[str, tuple[str, ...]] = {
    "kineto_dlrm_8ranks": ("rank1=usual", "collectives.all_reduce=0", "kernels.gemm=0.5"),
    "stragglers": ("stages=even", "rank1=usual"),
    "byteps_mxnet_2x2": ("compute=0.5", "communication=0"),
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


def _shared_jobs() -> list[WatchedJob]:
    return [
        WatchedJob(
            name=f"shared: {name}",
            open=functools.partial(imported, *(SHARED / path for path in paths)),
            changes=SHARED_CHANGES.get(name, ()),
            plans=False,
            refusals=True,
            is_shared=True,
        )
        for name, paths in SHARED_FILES.items()
    ]


JOBS: Mapping[str, WatchedJob] = {job.name: job for job in (*_local_jobs(), *_shared_jobs())}
