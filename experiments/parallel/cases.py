"""What is measured: models, ranks, links and strategies; `Case.job_toml` describes one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEQUENCE = 128
CONFIGS = {
    "gpt": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_layer": 8,
        "n_head": 8,
        "n_positions": SEQUENCE,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": SEQUENCE,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
    },
}
GLOBAL_BATCH, MICRO_BATCH = 16, 4
RATES = ("unlimited", "2gbit", "500mbit")
REAL = {
    2: {
        "ddp": "zero_stage=0",
        "fsdp2": "zero_stage=3",
        "tp": "tp=2,sequence_parallel=false",
        "gpipe": "pp=2,schedule=gpipe",
        "1f1b": "pp=2",
        "interleaved": "pp=2,virtual_stages=2",
    },
    4: {
        "ddp": "zero_stage=0",
        "fsdp2": "zero_stage=3",
        "tp": "tp=4,sequence_parallel=false",
        "1f1b": "pp=4",
        "tp x pp": "tp=2,pp=2,sequence_parallel=false",
        "fsdp2 x tp": "tp=2,zero_stage=3,sequence_parallel=false",
    },
}
PACED_RATES = ("500mbit", "125mbit")
SLOWER = (
    4  # A paced block takes so many times what a core needs: what ranks do beside waiting (dispatch, copies) must fit on two cores.
)
PACED = {
    8: {
        "gpipe x dp": "pp=4,schedule=gpipe",
        "1f1b x dp": "pp=4",
        "interleaved x dp": "pp=4,virtual_stages=2",
        "tp x pp": "tp=2,pp=4,sequence_parallel=false",
        "fsdp2 x tp": "tp=2,zero_stage=3,sequence_parallel=false",
    },
    16: {
        "1f1b x dp": "pp=4",
        "interleaved x dp": "pp=4,virtual_stages=2",
        "tp x pp": "tp=4,pp=4,sequence_parallel=false",
        "tp x pp x dp": "tp=2,pp=4,sequence_parallel=false",
        "fsdp2 x tp": "tp=4,zero_stage=3,sequence_parallel=false",
    },
}
RANKS_PER_HOST = {8: 2, 16: 4}  # of paced jobs: a stage has whole hosts
PACED_BATCH = {8: 64, 16: 128}
PACED_MICRO_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job under one strategy."""

    model: str
    ranks: int
    rate: str
    strategy: str
    settings: str  # As ``--set`` takes them.
    paced: bool

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return PACED_BATCH[self.ranks] if self.paced else GLOBAL_BATCH

    @property
    def job(self) -> str:
        """Name of the job's folder: strategies share it."""
        return f"{'paced' if self.paced else 'real'}-{self.model}-{self.ranks}-{self.rate}"

    @property
    def times(self) -> str:
        """Name of the file of recorded times, which jobs with other links share."""
        return f"{'paced' if self.paced else 'real'}-{self.model}-{self.ranks}.times.json"

    @property
    def recorded(self) -> str:
        """Name of the file of times as this machine took them; `times` is made of it."""
        return f"{self.times.removesuffix('.times.json')}.recorded.json" if self.paced else self.times

    def write(self, out: Path, cores: int) -> Path:
        """The files that describe the job; returns its ``job.toml``."""
        folder = out / self.job
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[self.model]))
        hosts = RANKS_PER_HOST[self.ranks] if self.paced else 1
        lines = [f'name = "{self.ranks // hosts} hosts"', f"hosts = {self.ranks // hosts}", f"devices = {hosts}", "[device]"]
        lines += ['name = "one CPU core"', 'vendor = "any"', 'kind = "cpu"', 'source = "this machine"']
        lines += ["[nic]", "count = 1", f'rate = "{self.rate}"', 'latency = "25us"', "[source]", 'all = "this machine"']
        if hosts > 1:
            lines += ["[loopback]", 'latency = "20us"']
        (folder / "cluster.toml").write_text("\n".join(lines) + "\n")
        job = [
            'model = "config.json"',
            'cluster = "cluster.toml"',
            f"global_batch = {self.batch}",
            f"sequence = {SEQUENCE}",
            'precision = "fp32"',
            'framework = "pytorch-gloo"',
            f'times = "../{self.times}"',
            *([] if self.paced or self.ranks <= cores else [f"cores = {cores}"]),
            "[runs]",
            f"micro_batch = {PACED_MICRO_BATCH if self.paced else MICRO_BATCH}",
        ]
        path = folder / "job.toml"
        path.write_text("\n".join(job) + "\n")
        return path


def cases(*, paced: bool) -> Iterator[Case]:
    """All of them, those of one job together."""
    for model in CONFIGS:
        for ranks, strategies in (PACED if paced else REAL).items():
            for rate in PACED_RATES if paced else RATES:
                for strategy, settings in strategies.items():
                    yield Case(model=model, ranks=ranks, rate=rate, strategy=strategy, settings=settings, paced=paced)
