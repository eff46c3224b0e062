"""`record`: step times of all jobs and variants, and profiles, on the machine with the GPU, within a budget of seconds."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from experiments.validation.gpu_jobs.jobs import JOBS, GpuJob, RandomCrops, Training, random_batch, smaller
from experiments.validation.gpu_jobs.parallel import DDP_VARIANTS, FSDP_VARIANTS, replicated, sharded
from experiments.validation.gpu_jobs.ranks import merged, run_ranks
from experiments.validation.gpu_jobs.results import Results
from experiments.validation.gpu_jobs.timing import Step, recorded, step_times, synchronise

PROFILE_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "resnet50-b128-bf16": {"with_stack": True},
    "gpt2-b8-bf16": {"profile_memory": True},
}
ROUNDS = 2
DDP_JOBS = ("bert-b4-bf16", "resnet50-b32-fp32")
FSDP_JOB = "bert-b32-bf16"
LOADED_JOB = "resnet50-b32-fp32"
HOST_BOUND = ("resnet50-b32-fp32", "bert-b4-bf16")  # or nearly so
GRAPH_PROFILED = "bert-b4-bf16"
COMPILED = ("bert-b4-bf16", "resnet50-b128-bf16")
COMPILE_S = 35.0
RANKS_S = (30.0, 50.0)  # that the two ranks get, at least and at most


@dataclass(frozen=True)
class Running:
    """A variant that was built."""

    step: Step
    training: Training


class Recorder:
    """All cases, the most telling first: what there is no time for is left out, and said to be."""

    def __init__(self, folder: Path, seconds: float, device: str, *, small: bool) -> None:
        self.results, self.device, self.small = Results(folder, seconds), device, small
        self._jobs = {job.name: smaller(job) if small else job for job in JOBS}
        self._steps = 2 if small else None  # of a round
        self._work = Path(tempfile.mkdtemp())

    def run(self) -> None:
        self.results.facts["machine"] = machine(self.device)
        self.results.write()
        for job in self._jobs.values():
            self._measure(job.name, self._plain_variants(job))
        for job in self._jobs.values():
            self._profile(job, PROFILE_OPTIONS.get(job.name, {}))
        self._profile_graph(self._jobs[GRAPH_PROFILED])
        with self.results.case("process group"):
            on_gpu = self.device == "cuda"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # no other rank is anywhere else
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", init_method=f"file://{self._work / 'store'}", rank=0, world_size=1
            )
        self._replicate(self._jobs[DDP_JOBS[0]])
        self._load(self._jobs[LOADED_JOB])
        self._compile(self._jobs[COMPILED[0]])
        self._two_ranks()
        self._replicate(self._jobs[DDP_JOBS[1]])
        self._shard(self._jobs[FSDP_JOB])
        self._compile(self._jobs[COMPILED[1]])
        self.results.write()

    def _plain_variants(self, job: GpuJob) -> dict[str, Callable[[], Running]]:
        found = {"eager": self._eager(job), "fused": self._eager(job, fused=True), "graph": self._graphed(job)}
        if job.name not in HOST_BOUND:
            found["without optimizer"] = self._eager(job, updates=False)
        if job.model == "bert":  # what only the optimizer's steps as tensors cost, which a graph needs
            found["capturable"] = self._eager(job, capturable=True)
        return found

    def _eager(self, job: GpuJob, **options: Any) -> Callable[[], Running]:
        def build() -> Running:
            training = Training(job, self.device, **options)
            return Running(training.step, training)

        return build

    def _graphed(self, job: GpuJob) -> Callable[[], Running]:
        """The whole step as a CUDA graph."""

        def build() -> Running:
            training = Training(job, self.device, capturable=True, autocast_cache=False)
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    training.step()
            torch.cuda.current_stream().wait_stream(beside)
            training.optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                training.step()
            return Running(graph.replay, training)

        return build

    def _compiled(self, job: GpuJob) -> Callable[[], Running]:
        def build() -> Running:
            training = Training(job, self.device)
            training.model = torch.compile(training.model)
            return Running(training.step, training)

        return build

    def _measure(self, name: str, variants: Mapping[str, Callable[[], Running]], *, needs_s: float = 4.0) -> None:
        """Rounds of all variants in turn (A B C A B C)."""
        built: dict[str, Running] = {}
        peaks: dict[str, int] = {}
        for variant, build in variants.items():
            with self.results.case(f"{name}, {variant}, built", needs_s=needs_s) as there_is_time:
                if there_is_time:
                    built[variant], peaks[variant] = _with_peak(build)
        for number in range(ROUNDS):
            for variant, running in list(built.items()):
                with self.results.case(f"{name}, {variant}, round {number}", needs_s=3.0) as there_is_time:
                    if there_is_time:
                        times = step_times(running.step, self._steps)
                        loss = float(running.training.loss)
                        self.results.add_round(name, variant, times, loss=loss, peak_bytes=peaks[variant])
        built.clear()
        _release()

    def _profile(
        self, job: GpuJob, options: Mapping[str, bool], *, name: str = "", build: Callable[[], Running] | None = None
    ) -> None:
        """Profile the job as it is, alone on the device, and measure it once more behind that."""
        name = name or job.name
        with self.results.case(f"{name}, profiled", needs_s=6.0) as there_is_time:
            if there_is_time:
                self._profile_running((build or self._eager(job))(), name, options)
        _release()

    def _profile_running(self, running: Running, name: str, options: Mapping[str, bool]) -> None:
        for _ in range(5):
            running.step()
        synchronise()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        path = self._work / f"{name}.json.gz"
        recorded(running.step, path, **options)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        self.results.add_profile(path, job=name, peak_bytes=peak, **options)
        self.results.write()
        self.results.add_round(name, "eager after profiling", step_times(running.step, self._steps))

    def _profile_graph(self, job: GpuJob) -> None:
        self._profile(job, {}, name=f"{job.name}-graph", build=self._graphed(job))

    def _load(self, job: GpuJob) -> None:
        """The job with its input loaded by the training process, and with one batch of the host, which is as large."""

        def loads() -> Running:
            training = Training(job, self.device)
            batches = iter(DataLoader(RandomCrops(job.side), batch_size=job.batch))

            def step() -> None:
                images, labels = next(batches)
                training.step_on(images.to(self.device), labels.to(self.device))

            return Running(step, training)

        def loaded() -> Running:
            training = Training(job, self.device)
            images, labels = random_batch(job, "cpu")
            return Running(lambda: training.step_on(images.to(self.device), labels.to(self.device)), training)

        name = f"{job.name}-loading"
        self._measure(name, {"eager": loads, "loaded once": loaded})
        self._profile(job, {}, name=name, build=loads)

    def _replicate(self, job: GpuJob) -> None:
        """DistributedDataParallel of one rank."""
        name = f"ddp-{job.name}"
        wraps = {variant: replicated(averages=True, **options) for variant, options in DDP_VARIANTS.items()}
        wraps["without a hook"] = replicated()
        self._measure(name, {variant: self._eager(job, wrap=wrap) for variant, wrap in wraps.items()})
        self._profile(job, {}, name=name, build=self._eager(job, wrap=wraps["as recorded"]))
        if job.name == DDP_JOBS[0]:
            self._profile(job, {}, name=f"{name}-without-hook", build=self._eager(job, wrap=wraps["without a hook"]))

    def _shard(self, job: GpuJob) -> None:
        """FSDP2 of one rank."""
        name = f"fsdp-{job.name}"
        builds = {variant: self._eager(job, wrap=sharded(**options), autocast=False) for variant, options in FSDP_VARIANTS.items()}
        self._measure(name, builds)
        self._profile(job, {"profile_memory": True}, name=name, build=builds["as recorded"])

    def _compile(self, job: GpuJob) -> None:
        variants = {"eager": self._eager(job), "compiled": self._compiled(job)}
        self._measure(f"{job.name}-compiled", variants, needs_s=COMPILE_S if self.device == "cuda" else 4.0)

    def _two_ranks(self) -> None:
        with self.results.case("two ranks", needs_s=RANKS_S[0]) as there_is_time:
            if there_is_time:
                folder = self._work / "ranks"
                seconds = min(self.results.left_s - 3.0, RANKS_S[1])
                failed = run_ranks(folder, seconds, self.device, small=self.small)
                merged(self.results, folder)
                if failed:
                    self.results.facts["errors"]["two ranks"] = "\n".join(failed)


def _with_peak(build: Callable[[], Running]) -> tuple[Running, int]:
    """A variant, and the most bytes that it had allocated while it was built and in its first steps."""
    if not torch.cuda.is_available():
        running = build()
        return running, 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    running = build()
    for _ in range(3):
        running.step()
    synchronise()
    return running, torch.cuda.max_memory_allocated() - before


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine(device: str) -> dict[str, Any]:
    """What the figures are of."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    try:
        import torchvision

        found["torchvision"] = torchvision.__version__
    except ImportError:
        found["torchvision"] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": torch.cuda.nccl.version(),
        }
    return found
