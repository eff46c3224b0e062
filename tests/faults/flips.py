"""A thousand damaged copies of each format, too many for every change: ``python -m tests.faults.flips FORMAT... [--tries N]``.

FORMAT: an input that `import` reads (real files beside the repository, ``../shared/traces``) or a file of our own (`OWN`). For each
a line, a JSON object, has the number of copies and what came of them: read whole, read with a loss that was told, refused in one
line. A copy that ends in a traceback, takes more than 10 seconds of processor time (or ten times that of the whole file) or more
memory than `MOST_BYTES`, or loses events without a word is listed under ``bad`` with its seed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from dpro_search.cli import main as command
from dpro_search.collect.capture import read_graph
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.errors import DproSearchError
from dpro_search.kinds import captured_text
from tests.collect.importer_kit import DAMAGES, plain
from tests.faults.processes import RAW, ROOT, succeeds
from tests.recordings import FEW_CLUSTERS

TRACES = ROOT.parent / "shared" / "traces"
MOST_BYTES = 2 * 2**30
LEAST_LIMIT_S, TIMES_WHOLE = 10.0, 10
AT_ONCE = 25  # copies that a process reads: to fork it takes longer than to read most of them
INPUTS = {  # patterns of the files of a job, of which the first is damaged
    "kineto": ("kineto_dlrm_8ranks/worker0_*", "kineto_dlrm_8ranks/worker1_*"),
    "horovod": ("tensorflow_horovod_2/timeline_default.json.gz",),
    "chakra": ("other_formats/chakra.0.et.gz",),
    "xplane": ("other_formats/jax_conv_8xMI300X.xplane.pb",),
    "runmetadata": ("tensorflow_horovod_2/rank0.v1_*", "tensorflow_horovod_2/rank1.v1_*"),
    "mxnet": ("mxnet_kvstore/worker0*", "mxnet_kvstore/worker1*", "mxnet_kvstore/server0*", "mxnet_kvstore/symbol.json"),
    "byteps": ("byteps_mxnet_2x2/worker0_comm*", "byteps_mxnet_2x2/worker1_comm*", "byteps_mxnet_2x2/van_*"),
    "stragglers": ("stragglers/trace-ST.parquet",),
}
CAPTURED = ROOT / "tests" / "data" / "captured" / "llama.json"
CONFIG = {  # as Hugging Face has it, of Llama 2 7B
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
SEARCHED = ("run", "--sampler", "mcmc", "--seed", "5", "--trials")
# Files of our own: which file of which prepared folder is damaged, and the command that reads it.
OWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "trace.npz": ("trace/trace.npz", ("replay", "trace", "--json")),
    "meta.json": ("trace/meta.json", ("replay", "trace", "--json")),
    "run.json": ("run/run.json", (*SEARCHED, "30", "--out", "run", "--json")),
    "trials.jsonl": ("run/trials.jsonl", (*SEARCHED, "30", "--out", "run", "--json")),
    "result.json": ("run/result.json", ("report", "run", "--out", "page.html")),
    "plan.json": ("plan.json", ("export", "plan.json", "--out", "tuned")),
    "model.json": ("model/model.json", _with_model := ("run", "--sample", "resnet50_2ranks_2gbit", "--with", "op-fusion",
                   "--cluster-model", "model", "--trials", "5", "--out", "fused", "--json")),
    "trees.npz": ("model/trees.npz", _with_model),
    "clusters.jsonl.gz": ("clusters.jsonl.gz", ("fit", "clusters.jsonl.gz", "--out", "fitted")),
    "machine.toml": ("machine.toml", ("replay", "trace", "--machine", "machine.toml", "--json")),
    "job.toml": ("job.toml", ("replay", "job.toml", "--json")),
    "config.json": ("config.json", ("describe", "config.json", "--cluster", "2xhgx-h100", "--json")),
    "graph.json": ("captured/graph.json", ("replay", "captured/job.toml", "--json")),
    "cluster.toml": ("cluster.toml", ("replay", "trace", "--cluster", "cluster.toml", "--json")),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Read damaged copies of files, again and again.")
    parser.add_argument("formats", nargs="+", choices=(*INPUTS, *OWN), metavar="FORMAT")
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="make fewer copies of a format when this time is over")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads does not live on in a process that is forked
    broken = False
    with tempfile.TemporaryDirectory(prefix="dpro-search-flips-") as name:
        for form in options.formats:
            row = campaign(form, Path(name) / form, range(options.seed, options.seed + options.tries), options.seconds)
            print(json.dumps(row), flush=True)
            broken |= bool(row["bad"])
    sys.exit(int(broken))


def campaign(form: str, folder: Path, seeds: range, seconds: float = float("inf")) -> dict[str, object]:
    """Damaged copies of a format, one for each seed; `seconds` ends it early."""
    folder.mkdir()
    read, path, data = _input(form, folder) if form in INPUTS else _own(form, folder)
    with contextlib.chdir(folder):
        read()  # what it imports and compiles is there in each process that is forked below
    ((whole, whole_s),) = _forked([read], LEAST_LIMIT_S * TIMES_WHOLE)
    assert not isinstance(whole, str), whole
    assert whole["outcome"] != "refused", "the undamaged file is refused; is an optional package missing?"
    limit_s = max(LEAST_LIMIT_S, TIMES_WHOLE * whole_s)
    tally, bad, longest_s, begun = Counter[str](), list[str](), 0.0, time.monotonic()

    def read_damaged(seed: int) -> dict:
        path.write_bytes(DAMAGES[_damage(seed)](data, np.random.default_rng(seed)))
        return read(whole)

    for some in (seeds[first : first + AT_ONCE] for first in range(0, len(seeds), AT_ONCE)):
        if time.monotonic() - begun > seconds:
            break
        for seed, (found, took_s) in zip(some, _forked([partial(read_damaged, seed) for seed in some], limit_s), strict=True):
            longest_s = max(longest_s, took_s)
            if isinstance(found, str) and _damage(seed) == "a block gone" and found.endswith("lost silently"):
                tally["gap that leaves valid text"] += 1  # no reader can see it
            elif isinstance(found, str):
                bad.append(f"seed {seed}, {_damage(seed)}: {found}")
            else:
                tally[found["outcome"]] += 1
            tally["copies"] += 1
    return {"format": form, **tally, "longest_s": round(longest_s, 1), "whole_s": round(whole_s, 1), "bad": bad}


def _damage(seed: int) -> str:
    return list(DAMAGES)[seed % len(DAMAGES)]


def _forked(reads: list[Callable[[], dict]], limit_s: float) -> list[tuple[dict | str, float]]:
    """Calls in a process of their own: what each returned or, a line of text, how it failed; and its processor time in s.

    If the process does not survive them, each call gets a process.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        limits_s = int(limit_s * len(reads)) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limits_s, limits_s + 1))
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump([_outcome(read) for read in reads], pipe)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        raw = pipe.read()
    _, status, used = os.wait4(child, 0)
    too_much = used.ru_maxrss * 1024 > MOST_BYTES
    if len(reads) > 1 and (status or too_much):
        return [outcome for read in reads for outcome in _forked([read], limit_s)]
    took_s = used.ru_utime + used.ru_stime
    if status:
        return [(f"ended by {status} after {took_s:.1f} s", took_s)]
    if too_much:
        return [(f"{used.ru_maxrss / 2**20:.1f} GiB of memory", took_s)]
    found: list[tuple[dict | str, float]] = pickle.loads(raw)
    return [(f"{took_s:.1f} s of processor time" if took_s > limit_s else outcome, took_s) for outcome, took_s in found]


def _outcome(read: Callable[[], dict]) -> tuple[dict | str, float]:
    begun_s = time.process_time()
    found: dict | str
    try:
        found = read()
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"[:300]
    return found, time.process_time() - begun_s


def _input(form: str, folder: Path) -> tuple[Callable[..., dict], Path, bytes]:
    sources = [path for pattern in INPUTS[form] for path in sorted(TRACES.glob(pattern))]
    paths = [folder / path.name.removesuffix(".gz") for path in sources]
    for source, path in zip(sources, paths, strict=True):
        path.write_bytes(plain(source))

    def read(whole: dict | None = None) -> dict:
        try:
            trace = import_trace(paths)
        except DproSearchError as error:
            return _refused(str(error), paths)
        trace.save(folder / "saved")
        Trace.load(folder / "saved")
        shutil.rmtree(folder / "saved")
        facts = {"events": len(trace.events), "ranks": trace.meta.ranks, "dropped": trace.meta.dropped}
        facts |= {"warnings": trace.meta.warnings, "outcome": "read whole"}
        if whole is not None:
            told = trace.meta.dropped != whole["dropped"] or trace.meta.warnings != whole["warnings"]
            if facts["events"] < whole["events"]:
                # Text may change its meaning and stay valid: one record becomes another of no interest.
                assert told or whole["events"] - facts["events"] <= 1, f"{whole['events'] - facts['events']} events lost silently"
            facts["outcome"] = "loss told" if told else "read whole" if facts["events"] >= whole["events"] else "one event less"
        return facts

    return read, paths[0], paths[0].read_bytes()


def _refused(line: str, paths: list[Path]) -> dict:
    assert "\n" not in line, "more than a line"
    assert any(str(path) in line for path in paths), f"names no file: {line}"
    return {"outcome": "refused"}


def _own(form: str, folder: Path) -> tuple[Callable[..., dict], Path, bytes]:
    place, words = OWN[form]
    _prepared(folder / "whole", words)

    def read(whole: dict | None = None) -> dict:
        there = folder / ("first" if whole is None else "there")  # what a process keeps of a path is of the undamaged file
        shutil.rmtree(there, ignore_errors=True)
        shutil.copytree(folder / "whole", there)
        if whole is not None:
            (there / place).write_bytes((folder / "damaged").read_bytes())
        os.chdir(there)  # for what it writes
        out, err = io.StringIO(), io.StringIO()
        code: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command([words[0], *(str(there / word) if (there / word).exists() else word for word in words[1:])])
            except SystemExit as ended:
                code = ended.code
        last = err.getvalue().splitlines()[-1:] or [""]
        assert code in (0, None, 1, 2), f"exit code {code}"
        assert "Traceback" not in err.getvalue(), err.getvalue()
        if code in (1, 2):
            assert last[0].startswith("dpro-search: error: "), err.getvalue()
            assert whole is not None, last[0]
        return {"outcome": "refused" if code in (1, 2) else "read"}

    return read, folder / "damaged", (folder / "whole" / place).read_bytes()


def _prepared(folder: Path, words: tuple[str, ...]) -> None:
    """What a command reads, in a new folder."""
    folder.mkdir()
    if "trace" in words:
        succeeds("import", RAW, "--out", folder / "trace")
    if "run" in words[1:]:
        succeeds(*SEARCHED, "20", "--out", folder / "run")
    if "plan.json" in words:
        succeeds(*SEARCHED, "20", "--out", folder / "run")
        shutil.copyfile(folder / "run" / "plans" / "plan-1.json", folder / "plan.json")
        shutil.rmtree(folder / "run")
    if "model" in words:
        succeeds("fit", FEW_CLUSTERS, "--out", folder / "model")
    if "clusters.jsonl.gz" in words:
        shutil.copyfile(FEW_CLUSTERS, folder / "clusters.jsonl.gz")
    if "job.toml" in words:
        job = succeeds("describe", "gpt2-xl", "--cluster", "2xhgx-h100", "--global-batch", 64, "--seq-len", 1024)
        (folder / "job.toml").write_text(job)
    if "config.json" in words:
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    if "captured/job.toml" in words:
        (folder / "captured").mkdir()
        shutil.copyfile(CAPTURED, folder / "captured" / "graph.json")
        text = captured_text(read_graph(CAPTURED), "graph.json", "8xh100")
        (folder / "captured" / "job.toml").write_text(text)
    if "machine.toml" in words:
        shutil.copyfile(ROOT / "dpro_search" / "machine" / "testbed.toml", folder / "machine.toml")
    if "cluster.toml" in words:
        shutil.copyfile(next((ROOT / "dpro_search" / "cluster" / "machines").glob("*.toml")), folder / "cluster.toml")


if __name__ == "__main__":
    main()
