"""Files of every format with one wrong field, given to the verbs that read them: ``python -m tests.faults.fields [FORMAT...]``.

A field is left out, null, of another type, negative, 0, huge, NaN, infinite, empty, nested or there twice; the file stays valid
JSON or TOML, so that the check is of the values and not of the parser (`tests.faults.flips` damages bytes). Commands run in this
process. A failure is a traceback, another exit code than 0, 1 and 2, more than one line of error, a warning of a library, or a
predicted time that is not above 0 and below `MOST_US`. For each format a line, a JSON object, has the number of inputs and the
failures with their seeds; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import re
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.collect.capture import read_graph
from dpro_search.collect.tables.all_reduces import AllReduceRow, CommHeader, CommTable, write_comm_table
from dpro_search.collect.tables.parallel_times import ParallelTimes, UpdateTime
from dpro_search.kinds import captured_text
from tests.collect.kineto_files import collective_job, distributed, small_job
from tests.faults.flips import CAPTURED, CONFIG
from tests.faults.processes import ROOT
from tests.in_process import dpro, succeeds
from tests.recordings import FEW_CLUSTERS
from tests.sample import horovod_trace_path

MOST_US = 1e13  # of a predicted step: four months
MOST_LINE = 1700
LONGEST_S = 60
TWICE = "\x00twice"  # ends the second name of a key that stands twice
GONE = object()
WRONG: tuple[Any, ...] = (
    GONE, None, True, "", "x", "nan", "-1", 0, -1, 1, 2, 0.5, -0.5, 1e-300, 1e18, 1e300, math.nan, math.inf, -math.inf,
    2**31, 2**53 + 1, 2**63, 10**30, [], [[]], [None], [0], {}, {"a": {"b": {}}},
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """A file that is changed, and the commands that read it; words of commands that name prepared files become paths."""

    place: str
    commands: tuple[str, ...]  # of one, words are separated by a space, and commands that follow each other by &&
    prepare: Callable[[Path], object]
    kind: str = "json"  # json, jsonl (of which a line is changed), toml, npz


def main() -> None:
    parser = argparse.ArgumentParser(description="Give files with one wrong field to every verb.")
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; default: all")
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    request = parser.parse_args()
    broken = False
    for name in request.formats or FORMATS:
        row = campaign(name, range(request.seed, request.seed + request.tries))
        print(json.dumps(row, indent=1), flush=True)
        broken |= bool(row["bad"])
    sys.exit(int(broken))


def campaign(name: str, seeds: Iterable[int]) -> dict[str, Any]:
    """Commands on one changed file for each seed."""
    tally, bad = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="dpro-search-fields-") as folder:
        whole, changed = Path(folder, "whole"), Path(folder, "changed")
        whole.mkdir()
        FORMATS[name].prepare(whole)
        for seed in seeds:
            for words in FORMATS[name].commands:
                shutil.rmtree(changed, ignore_errors=True)
                shutil.copytree(whole, changed)
                done = change(changed / FORMATS[name].place, FORMATS[name].kind, np.random.default_rng(seed))
                failure, code = "", 0
                for step in words.split(" && "):
                    if not failure and not code:
                        failure, code = failure_of(changed, step.split())
                tally["refused" if code else "answered"] += 1
                if failure:
                    bad.append(f"seed {seed}, {done}, {words}: {failure}")
                    print(name, bad[-1], file=sys.stderr, flush=True)
    return {"format": name, **tally, "bad": bad}


def failure_of(folder: Path, words: Sequence[str]) -> tuple[str, int]:
    """The fault in a command's output, or "", and its exit code."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        verb, *rest = words
        rest, out = (rest[:-2], folder / rest[-1]) if ">" in rest else (rest, None)
        done = dpro(verb, *(folder / word if (folder / word).exists() else word for word in rest), cwd=folder)
        if out is not None:
            out.write_text(done.stdout)
    except Exception as error:
        frame = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if "/dpro_search/" in f.filename)
        return f"{type(error).__name__}: {str(error)[:200]} at {frame.filename.partition('/dpro_search/')[2]}:{frame.lineno}", -1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    errors = [line for line in done.stderr.splitlines() if line.startswith("dpro-search: error: ")]
    if done.returncode not in (0, 1, 2) or len(errors) != bool(done.returncode):
        return f"exit code {done.returncode} with {len(errors)} lines of error", done.returncode
    if "Warning:" in done.stderr and ".py:" in done.stderr:
        return f"warning: {done.stderr.strip()[-300:]}", done.returncode
    if errors and len(errors[0]) > MOST_LINE:
        return f"an error of {len(errors[0])} characters", done.returncode
    if not done.returncode and "--json" in words:
        wrong = list(impossible(json.loads(done.stdout)))
        return f"impossible times: {', '.join(wrong[:3])}" if wrong else "", 0
    return "", done.returncode


def impossible(facts: Any) -> Iterator[str]:
    """Predicted times of a command's JSON that no step can take."""
    for key in ("predicted_iteration_us", "measured_iteration_us", "iteration_us"):
        if isinstance(facts, dict) and key in facts:
            value = facts[key]
            missing = value is None and key == "measured_iteration_us"  # what was not recorded has none
            if not missing and not (isinstance(value, int | float) and 0 < value < MOST_US):
                yield f"{key} {value}"


def change(path: Path, kind: str, rng: np.random.Generator) -> str:
    """Change one field of a file; returns what was changed."""
    packed = path.suffix == ".gz"
    raw = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    if kind == "npz":
        return _change_column(path, rng)
    if kind == "toml":
        value, done = changed_tree(tomllib.loads(raw.decode()), rng)
        text = toml(value)
    elif kind == "csv":
        value, done = changed_tree([line.split(",") for line in raw.decode().splitlines()], rng)
        text = "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in value)
    elif kind == "jsonl":
        lines = raw.decode().splitlines()
        at = int(rng.integers(min(len(lines), 4)))
        value, done = changed_tree(json.loads(lines[at]), rng)
        lines[at] = _json(value)
        text = "\n".join(lines) + "\n"
    else:
        value, done = changed_tree(json.loads(raw), rng)
        text = _json(value)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return done


def changed_tree(value: Any, rng: np.random.Generator) -> tuple[Any, str]:
    """A tree with a wrong value at a place of which each depth is as likely."""
    value = copy.deepcopy(value)
    levels: dict[int, list[tuple[Any, ...]]] = {}
    for place in _places(value):
        levels.setdefault(len(place), []).append(place)
    places = levels[int(rng.choice(sorted(levels)))]
    *above, last = places[int(rng.integers(len(places)))]
    parent = value
    for step in above:
        parent = parent[step]
    wrong = _scaled(parent[last], rng) if rng.integers(2) else WRONG[int(rng.integers(len(WRONG)))]
    where = "/".join(map(str, [*above, last]))
    if isinstance(parent, dict) and rng.integers(10) == 0:
        parent[f"{last}{TWICE}"] = copy.deepcopy(parent[last])
        return value, f"{where} twice"
    if wrong is GONE:
        del parent[last]
        return value, f"{where} left out"
    parent[last] = copy.deepcopy(wrong)
    return value, f"{where} = {wrong!r}"


def _scaled(value: Any, rng: np.random.Generator) -> Any:
    """A number of another order of magnitude, also inside a text such as "80GB"; any other value by one of `WRONG`."""
    factor = float(rng.choice([-1, 0, 1e-12, 1e-6, 1e-3, 0.5, 3, 1e3, 1e6, 1e9, 1e12, 1e18]))
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return WRONG[int(rng.integers(len(WRONG)))]
    if isinstance(value, str):
        number = re.search(r"\d+(\.\d+)?", value)
        return value if number is None else f"{value[: number.start()]}{float(number[0]) * factor:g}{value[number.end() :]}"
    return round(value * factor) if isinstance(value, int) else value * factor


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field, and the first and last elements of every list."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*at, key))
    elif isinstance(value, list) and value:
        picked = sorted({0, len(value) // 2, len(value) - 1}) if len(value) > 30 else range(len(value))
        for index in picked:
            yield from _places(value[index], (*at, index))


def _json(value: Any) -> str:
    text = json.dumps(value)
    return (
        text.replace(json.dumps(TWICE)[1:-1], "")
        .replace("NaN", "1e999")
        .replace("-Infinity", "-1e999")
        .replace("Infinity", "1e999")
    )


def toml(value: dict[str, Any]) -> str:
    """TOML in which all tables but the first are inline; null is left out, which TOML does not have."""
    return "\n".join(f"{_key(key)} = {_toml_value(inner)}" for key, inner in value.items() if inner is not None) + "\n"


def _key(key: str) -> str:
    return json.dumps(key.removesuffix(TWICE))


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml_value(inner)}" for key, inner in value.items() if inner is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(inner) for inner in value if inner is not None) + "]"
    if isinstance(value, float):
        return repr(value).replace("e+", "e")
    return json.dumps(value)


def _change_column(path: Path, rng: np.random.Generator) -> str:
    with np.load(path) as data:
        columns = dict(data)
    name = sorted(columns)[int(rng.integers(len(columns)))]
    column = columns[name]
    change_name = str(rng.choice(["empty", "shorter", "scalar", "type", "gone", "value", "all"]))
    if change_name == "empty":
        columns[name] = column[:0]
    elif change_name == "shorter":
        columns[name] = column[: len(column) // 2]
    elif change_name == "scalar":
        columns[name] = np.asarray(column.ravel()[0]) if column.size else np.asarray(0)
    elif change_name == "type":
        columns[name] = column.astype([str, np.complex128, np.bool_, np.float16][int(rng.integers(4))])
    elif change_name == "gone":
        del columns[name]
    elif column.size:
        numbers = [0, -1, 1, 2**31 - 1] if column.dtype.kind in "iub" else [0.0, -1e18, 1e18, 1e300, math.nan, math.inf]
        wrong = numbers[int(rng.integers(len(numbers)))]
        columns[name] = column.copy()
        with np.errstate(all="ignore"):
            columns[name][... if change_name == "all" else int(rng.integers(len(column)))] = np.asarray(wrong).astype(column.dtype)
        change_name = f"{change_name} {wrong}"
    np.savez(path, **columns)
    return f"{name} {change_name}"


def _profiles(folder: Path) -> None:
    small_job(steps=4).write(folder / "rank0.json")


def _two_profiles(folder: Path) -> None:
    (folder / "job").mkdir()
    for rank in range(2):
        collective_job(rank).write(folder / "job" / f"rank{rank}.json", header=distributed(rank, 2))


def _trace(folder: Path) -> None:
    _two_profiles(folder)
    succeeds("import", folder / "job", "--out", folder / "trace")


def _sample(folder: Path) -> None:
    shutil.copytree(horovod_trace_path(), folder / "trace")


def _run(folder: Path) -> None:
    succeeds("run", "--trials", 12, "--sampler", "mcmc", "--seed", 5, "--out", folder / "run")


def _plan(folder: Path) -> None:
    _run(folder)
    shutil.copyfile(folder / "run" / "plans" / "plan-1.json", folder / "plan.json")


def _job(folder: Path) -> None:
    job = succeeds("describe", "gpt2-xl", "--cluster", "2xhgx-h100", "--global-batch", 64, "--seq-len", 1024)
    (folder / "job.toml").write_text(job)


def _config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _cluster(folder: Path) -> None:
    shutil.copyfile(ROOT / "dpro_search" / "cluster" / "machines" / "hgx-h100.toml", folder / "cluster.toml")


def _device(folder: Path) -> None:
    shutil.copyfile(ROOT / "dpro_search" / "cluster" / "devices" / "h100-sxm.toml", folder / "device.toml")
    (folder / "cluster.toml").write_text('base = "hgx-h100"\ndevice = "device.toml"\n')


def _machine(folder: Path) -> None:
    shutil.copyfile(ROOT / "dpro_search" / "machine" / "testbed.toml", folder / "machine.toml")


def _table(folder: Path) -> None:
    sizes = [1024 * 4**power for power in range(8)]
    rows = [
        AllReduceRow(
            backend="gloo", algorithm="ring", ranks=2, size_bytes=size, rounds_us=(100 + size / 100,), calls=1, sent_bytes=size
        )
        for size in sizes
    ]
    header = CommHeader(machine="m", cores=2, versions={}, started_at="2026-01-01")
    write_comm_table(folder / "table.jsonl", CommTable(header=header, rows=tuple(rows), dropped={}))


def _clusters(folder: Path) -> None:
    (folder / "clusters.jsonl").write_bytes(gzip.decompress(FEW_CLUSTERS.read_bytes()))


def _times(folder: Path) -> None:
    from tests.parallel.test_split import CONFIG as SMALL
    from tests.parallel.test_split import HOSTS, blocks, exchanges

    (folder / "config.json").write_bytes(json.dumps(SMALL).encode())
    (folder / "cluster.toml").write_text(HOSTS)
    times = ParallelTimes(
        memory_bytes_per_s=1e10, flops_per_s=5e10, updates=(UpdateTime(elements=1.0, us=0.0),), blocks=tuple(blocks()),
        collectives=tuple(exchanges()),
    )  # fmt: skip
    times.save(folder / "times.json")
    lines = ['model = "config.json"', 'cluster = "cluster.toml"', "global_batch = 8", "sequence = 16", 'precision = "fp32"']
    lines += ['framework = "pytorch-gloo"', 'times = "times.json"', "[runs]", "micro_batch = 1", ""]
    (folder / "job.toml").write_text("\n".join(lines))


def _captured(folder: Path) -> None:
    shutil.copyfile(CAPTURED, folder / "graph.json")
    (folder / "job.toml").write_text(captured_text(read_graph(CAPTURED), "graph.json", "8xh100"))


def _nccl_table(folder: Path) -> None:
    rows = [f"{1024 * 4**power},x,x,{10000 + 10.24 * 4**power},x,{11000 + 10.24 * 4**power}" for power in range(9)]
    (folder / "nccl").mkdir()
    (folder / "nccl" / "AR_GPU2_1K_1M_LUT").write_text("\n".join(["size,a,b,c,d,e", *rows]) + "\n")


ANSWERS = ("replay {} --json", "diagnose {} --json", "report {} --out page.html", "replay {} --what-if compute=0.5 --json")
OF_TRACE = tuple(command.format("trace") for command in ANSWERS)
THEN_ALL = " && ".join(("", *OF_TRACE))
OF_RUN = ("report run --out page.html", "export run --out tuned")
ON_CLUSTER = "describe gpt2-xl --cluster cluster.toml > job.toml && replay job.toml --json"
FORMATS: dict[str, Format] = {
    "kineto": Format("rank0.json", (f"import rank0.json --out trace{THEN_ALL}",), _profiles),
    "kineto-ranks": Format("job/rank0.json", (f"import job --out trace{THEN_ALL}",), _two_profiles),
    "meta.json": Format("trace/meta.json", OF_TRACE, _sample),
    "profile-meta.json": Format("trace/meta.json", OF_TRACE, _trace),
    "trace.npz": Format("trace/trace.npz", OF_TRACE, _sample, "npz"),
    "profile-trace.npz": Format("trace/trace.npz", OF_TRACE, _trace, "npz"),
    "run.json": Format("run/run.json", OF_RUN, _run),
    "result.json": Format("run/result.json", OF_RUN, _run),
    "trials.jsonl": Format(
        "run/trials.jsonl", (OF_RUN[0], "run --trials 14 --sampler mcmc --seed 5 --out run --json"), _run, "jsonl"
    ),
    "plan.json": Format("plan.json", ("export plan.json --out tuned", "replay --plan plan.json --json"), _plan),
    "job.toml": Format("job.toml", tuple(command.format("job.toml") for command in ANSWERS), _job, "toml"),
    "times.json": Format("times.json", ("replay job.toml --json", "diagnose job.toml --json"), _times),
    "graph.json": Format("graph.json", ("replay job.toml --json",), _captured),
    "config.json": Format("config.json", (ON_CLUSTER.replace("gpt2-xl", "config.json").replace("cluster.toml", "h100"),), _config),
    "cluster.toml": Format("cluster.toml", ("replay --cluster cluster.toml --json", ON_CLUSTER), _cluster, "toml"),
    "device.toml": Format("device.toml", (ON_CLUSTER,), _device, "toml"),
    "machine.toml": Format("machine.toml", ("replay --machine machine.toml --json",), _machine, "toml"),
    "table.jsonl": Format("table.jsonl", ("fit table.jsonl --out model",), _table, "jsonl"),
    "clusters.jsonl": Format("clusters.jsonl", ("fit clusters.jsonl --out model",), _clusters, "jsonl"),
    "AR_GPU2_LUT": Format("nccl/AR_GPU2_1K_1M_LUT", ("fit nccl --out model",), _nccl_table, "csv"),
}


if __name__ == "__main__":
    main()
