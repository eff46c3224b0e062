"""Jobs of PyTorch on Gloo: DistributedDataParallel, and models that ``torch.distributed.fsdp.fully_shard`` divides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpro_search.collect.assemble.common import RankFile
from dpro_search.collect.assemble.torch.files import FORMAT, FSDP_FORMAT, read_torch_hook
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.launchers._base import LaunchedJob, Launcher
from dpro_search.collect.trace import Trace


@dataclass(frozen=True, kw_only=True)
class TorchLauncher(Launcher):
    """Starts the ranks as torchrun would; what the recorder finds decides between the two ways to communicate."""

    framework: str = "pytorch"
    environment: str = "torch"
    modules: tuple[str, ...] = ("torch",)

    def start(self, run: LaunchedJob) -> None:
        run_torch_ranks(run.spec, run.folder, hosts=run.hosts, hook=run.hook)

    def assemble(self, raw: Path) -> Trace:
        return assemble_torch(raw)

    def read_hook(self, folder: Path) -> RankFile:
        return read_torch_hook(folder / "hook.json")


PYTORCH_DDP = TorchLauncher(comm="ddp", format=FORMAT)
PYTORCH_FSDP = TorchLauncher(comm="fsdp", format=FSDP_FORMAT)
