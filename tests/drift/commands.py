"""The commands whose JSON output the drift gate watches; all run in this process, in one folder with their inputs."""

from __future__ import annotations

import functools
import json
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.report.gathered import facts_of_run, facts_of_source
from tests.drift.jobs import JOB_FILES, JOBS, write_captured_job
from tests.in_process import succeeds
from tests.kinds import synchronised_runs
from tests.recordings import DATA

# Values that differ from one run or checkout to the next: only their type is kept.
VARYING = frozenset(
    {
        *(
            "seconds",
            "replay_seconds",
            "trace",
            "run",
            "folder",
            "files",
            "created",
            "version",
            "dpro_search",
            "report",
            "provenance",
        ),
        *("terms", "trials_per_second", "search_seconds"),
    }
)
MOST_ITEMS = 4  # of a list; the others are summed up
MOST_ENTRIES = 40  # of a mapping

# Commands by name. A word in braces is a source of `JOBS` or `JOB_FILES`, saved as a file; ``{run NAME}`` is the folder of that
# command's search, and ``{new}`` a path that does not exist.
_REPLAYED = (
    *(
        "resnet50_2ranks_2gbit",
        "bert_kvstore_500mbit",
        "resnet50_ddp_a100",
        "mxnet_horovod_mlp",
        "ddp_mlp",
        "ddp_blocks",
        "fsdp_mlp",
    ),
    *("kvstore_mlp", "byteps_mlp", "ddp_resnet50_h200", "gloo_ddp_bert", "ddp_mlp_kineto", "fsdp_mlp_kineto"),
    *("kineto_modules", "inceptionv3", "described_dense", "described_experts", "described_sharded", "captured", "unequal_workers"),
)
_DIAGNOSED = (
    *("resnet50_2ranks_2gbit", "mxnet_horovod_mlp", "ddp_blocks", "fsdp_mlp", "kvstore_mlp", "byteps_mlp"),
    *("gloo_ddp_bert", "fsdp_mlp_kineto", "kineto_modules", "inceptionv3", "described_dense", "described_experts"),
    "unequal_workers",
)
_SEARCHED: Mapping[str, str] = {
    "resnet50_2ranks_2gbit": "--sampler critical-path",
    "ddp_blocks": "--sampler mcmc --with recomputation --allow-lossy",
    "fsdp_mlp": "",
    "kvstore_mlp": "--sampler nsga2",
    "byteps_mlp": "--sampler mcmc",
    "ddp_resnet50_h200": "--sampler mcmc",
    "fsdp_mlp_kineto": "",
    "described_dense": "",
    "unequal_workers": "",
}
COMMANDS: Mapping[str, str] = {
    "samples": "samples",
    "describe --list": "describe --list",
    "describe llama3-8b": "describe llama3-8b --cluster 2xhgx-h100",
    "describe mixtral-8x7b": "describe mixtral-8x7b --cluster 64xh100 --global-batch 256 --seq-len 2048",
    "import ddp": f"import {DATA}/ddp_mlp/rank0/kineto.json.gz {DATA}/ddp_mlp/rank1/kineto.json.gz --out {{new}}",
    "import fsdp": f"import {DATA}/fsdp_mlp/rank0/kineto.json.gz {DATA}/fsdp_mlp/rank1/kineto.json.gz --out {{new}}",
    "import h200": f"import {DATA}/ddp_resnet50_h200.json.gz --out {{new}}",
    "import inceptionv3": f"import {DATA}/mxnet_branched/inceptionv3_threaded.json.gz --out {{new}}",
    **{f"replay {name}": f"replay {{{name}}}" for name in _REPLAYED},
    "replay with a plan's settings": "replay {gpt_ddp_1gbit} --set bucket_cap_bytes=1MiB --set rate=500mbit --what-if compute=0.9",
    "replay a held-out step": "replay {resnet50_2ranks_2gbit} --holdout-step 18",
    "replay own durations": "replay {ddp_blocks} --own-durations",
    "replay samples": "replay {resnet50_2ranks_2gbit} --samples 3",
    "replay on a cluster": "replay {ddp_resnet50_h200} --cluster h100 --set tokens=8192 --set flops=2e12",
    "replay described with price": "replay {described_dense} --set price=4.1 --set power=400W --set tp=4",
    **{f"diagnose {name}": f"diagnose {{{name}}}" for name in _DIAGNOSED},
    "diagnose on a cluster": "diagnose {ddp_blocks} --cluster 16xhgx-h100 --set compute=0.9",
    "diff ddp": "diff {ddp_mlp} {ddp_blocks}",
    "diff fsdp": "diff {fsdp_mlp} {fsdp_mlp_prefetch}",
    **{f"run {name}": f"run {{{name}}} --trials 12 --seed 3 --out {{new}} {more}" for name, more in _SEARCHED.items()},
    "expect described": "expect {described_dense} --measured mfu=30% --measured memory=40GiB",
    "run on clusters": "run {described_dense} --trials 6 --cluster 2xhgx-h100,4xhgx-a100 --out {new}",
    "export ddp": "export {run ddp_blocks} --out {new}",
    "export horovod": "export {run resnet50_2ranks_2gbit} --out {new}",
    "export described": "export {run described_dense} --out {new}",
    **{f"report {name}": f"report {{{name}}}" for name in ("ddp_blocks", "described_sharded")},
    "report of a search": "report {run fsdp_mlp}",
}


def output_of(name: str) -> Any:
    """The output of a command: numbers and names in full for short lists, sums for the rest of long ones."""
    verb, *words = COMMANDS[name].replace("{run ", "{run-").split()
    paths = [_path(word[1:-1], name) if word.startswith("{") else word for word in words]
    return _condensed(_report_facts(Path(paths[0])) if verb == "report" else json.loads(succeeds(verb, *paths, "--json")))


def _report_facts(path: Path) -> Any:
    """The content of a report; `report --json` itself prints only the path of the page."""
    facts = facts_of_run(path, None) if (path / "run.json").is_file() else facts_of_source(path)
    return json.loads(msgspec.json.encode(facts, enc_hook=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError


def _path(word: str, command: str) -> Path:
    """The path that a word in braces stands for."""
    if word == "new":
        return _folder() / command.replace(" ", "-")
    if word.startswith("run-"):
        command = f"run {word.removeprefix('run-')}"
        folder = _path("new", command)
        if not folder.exists():
            output_of(command)
        return folder
    return _saved(word)


@functools.cache
def _folder() -> Path:
    """A folder that stays until the process ends."""
    kept = tempfile.TemporaryDirectory(prefix="drift")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _saved(name: str) -> Path:
    """A trace folder or file of a watched job."""
    path = _folder() / name
    if (description := JOB_FILES.get(name.removeprefix("described_"))) is not None:
        path = path.with_suffix(".toml")
        path.write_text(description)
    elif name == "captured":
        path.mkdir()
        path = write_captured_job(path)
    elif name == "unequal_workers":
        synchronised_runs.recording(path.with_suffix(".jsonl"))
        path = path.with_suffix(".jsonl")
    else:
        source = JOBS[name].open()
        assert isinstance(source, Trace)
        source.save(path)
    return path


def _condensed(value: Any, key: str = "") -> Any:
    if key in VARYING and not isinstance(value, dict):
        return f"<{type(value).__name__}>"
    if key == "job" and isinstance(value, str):
        return tomllib.loads(value)  # of `describe`: comments may change, settings may not
    if isinstance(value, dict):
        kept = sorted(value)[:MOST_ENTRIES]
        entries = {name: _condensed(value[name], name) for name in kept}
        return (
            entries if len(kept) == len(value) else entries | {"...": _summed([value[name] for name in value if name not in kept])}
        )
    if isinstance(value, list):
        items = [_condensed(item) for item in value[:MOST_ITEMS]]
        return items if len(value) <= MOST_ITEMS else [*items, {"...": _summed(value[MOST_ITEMS:])}]
    if isinstance(value, str) and (" " in value or "/" in value):
        return "<text>"  # sentences are read by people and may be reworded
    return value


def _summed(values: list[Any]) -> dict[str, Any]:
    """The number of items, and the sum of the absolute values of all numbers within them."""
    return {"items": len(values), "sum": float(sum(_numbers_in(values)))}


def _numbers_in(value: Any) -> list[float]:
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [abs(value)]
    if isinstance(value, dict):
        return [number for name, entry in value.items() if name not in VARYING for number in _numbers_in(entry)]
    return [number for item in value for number in _numbers_in(item)] if isinstance(value, list) else []
