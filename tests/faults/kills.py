"""Commands that are ended with SIGKILL at random points, again and again; what is checked after each, and a tally of what happened.

The tests make some kills of each kind, `python -m tests.faults.hundred KIND` a hundred.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dpro_search.collect.trace import Trace
from dpro_search.search import SearchResult
from dpro_search.space.plan import Plan
from tests.faults.processes import RAW, SEARCH, killed_after, shown, succeeds
from tests.recordings import FEW_CLUSTERS

# Words of a command that end in the option for what it writes, the name of that, and a check of it.
Writer = tuple[tuple[object, ...], str, Callable[[Path], None]]
MORE_TRIALS = 10  # that each search of a run folder asks for
_GROWTH = 1.05  # of the time that a command may take, from one that was killed to the next: searches become longer


@dataclass(kw_only=True)
class Kills:
    """How many there are to be, and what came of those so far."""

    wanted: int
    seed: int = 1
    seconds: float | None = None  # End early after this time; None: make all.
    # "killed", or "had ended" where the command was done before its time came; "left a temporary name".
    tally: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._took_s = math.inf

    def numbers(self) -> Iterator[int]:
        """Of the commands to start, until as many as wanted were killed."""
        begun = time.monotonic()
        for number in itertools.count():
            if self.tally["killed"] >= self.wanted or (self.seconds is not None and time.monotonic() - begun > self.seconds):
                return
            yield number

    def kill(self, within_s: float, *args: object, cwd: Path | None = None, earliest_s: float = 0.0) -> None:
        """Start a command, and kill it at some time before `within_s`, and before the last one that was not killed had ended."""
        begun = time.monotonic()
        killed = killed_after(self.chance.uniform(earliest_s, min(within_s, self._took_s)), *args, cwd=cwd)
        self._took_s = self._took_s * _GROWTH if killed else time.monotonic() - begun
        self.tally["killed" if killed else "had ended"] += 1


def timed(*args: object, cwd: Path | None = None) -> float:
    """Run a command that succeeds: how many seconds it took."""
    started = time.monotonic()
    succeeds(*args, cwd=cwd)
    return time.monotonic() - started


def kill_searches(folder: Path, kills: Kills) -> None:
    """A search that is killed and continued ends as one that was left alone; no finished trial that was written down is lost."""
    seconds = timed(*SEARCH, MORE_TRIALS * kills.wanted, "--out", "timed", cwd=folder)
    journal, seen, everything = folder / "killed" / "trials.jsonl", b"", 0
    for number in kills.numbers():
        everything = MORE_TRIALS * (number + 1)
        kills.kill(seconds, *SEARCH, everything, "--out", "killed", cwd=folder)
        lines = whole_lines(journal)
        assert lines.startswith(seen), "what was written down before is there still"
        seen = lines
        kills.tally["left a temporary name"] = len(list(folder.rglob(".*")))
    for out in ("killed", "whole"):
        succeeds(*SEARCH, everything, "--out", out, cwd=folder)
    assert journal.read_bytes() == (folder / "whole" / "trials.jsonl").read_bytes()
    assert SearchResult.load(folder / "killed").plans == SearchResult.load(folder / "whole").plans


def kill_shared_searches(folder: Path, kills: Kills) -> None:
    """A study in an SQLite file loses no finished trial; a killed search that is continued ends with as many as were asked for."""
    args = ("run", "--sample", "resnet50_2ranks_2gbit", *SEARCH[1:-1])  # a job with more plans than are asked for
    timed_args = (*args, "--storage", f"sqlite:///{folder}/timed.db", "--out", "timed")
    seconds = timed(*timed_args, "--trials", MORE_TRIALS * min(kills.wanted, 30), cwd=folder)
    args = (*args, "--storage", f"sqlite:///{folder / 'study.db'}", "--out", "killed", "--trials")
    seen, everything = 0, 0
    for number in kills.numbers():
        everything = MORE_TRIALS * (number + 1)
        kills.kill(seconds, *args, everything, cwd=folder)
        line_count = whole_lines(folder / "killed" / "trials.jsonl").count(b"\n")
        assert line_count >= seen, "what was written down before is there still"
        seen = line_count
    succeeds(*args, everything, cwd=folder)
    assert SearchResult.load(folder / "killed").trials == everything
    numbers = [json.loads(line)["number"] for line in (folder / "killed" / "trials.jsonl").read_text().splitlines()]
    assert numbers == sorted(set(numbers))


def kill_searches_with_workers(folder: Path, kills: Kills) -> None:
    """The same with worker processes, which end with the search; there, which plan comes next depends on who was quicker."""
    args = ("run", "--sampler", "auto", "--workers", 2, "--seed", 5, "--out", "killed", "--trials")
    seconds = timed(*args[:-3], "--out", "timed", "--trials", MORE_TRIALS * kills.wanted, cwd=folder)
    journal, seen, everything = folder / "killed" / "trials.jsonl", b"", 0
    for number in kills.numbers():
        everything = MORE_TRIALS * (number + 1)
        kills.kill(seconds, *args, everything, cwd=folder)
        lines = whole_lines(journal)
        assert lines.startswith(seen), "what was written down before is there still"
        seen = lines
    succeeds(*args, everything, cwd=folder)
    assert SearchResult.load(folder / "killed").trials == everything


def kill_writers(folder: Path, kills: Kills, *, writer: Writer) -> None:
    """What a command writes is whole or not there."""
    args, name, check = writer
    (folder / ".plan.json").write_bytes(Plan(tensor_groups=(("a#0", "b#1"),)).to_json())
    args = tuple(folder / ".plan.json" if argument is PLAN else argument for argument in args)
    seconds = timed(*args, folder / "whole")
    for number in kills.numbers():
        out = folder / f"{number}-{name}"
        kills.kill(seconds, *args, out)
        kills.tally["left a temporary name"] = len([path for path in folder.iterdir() if path.name.startswith(f".{number}-")])
        assert shown(folder) in (["whole"], sorted([out.name, "whole"]))
        if out.exists():
            check(out)
            out.rename(folder / f".done{number}")
    succeeds(*args, folder / name)
    check(folder / name)


def kill_readers(folder: Path, kills: Kills, *, verb: str) -> None:
    """A command that only prints leaves nothing where it ran, and changes nothing in a trace's folder; the next one works."""
    trace = folder / "trace"
    succeeds("import", RAW, "--out", trace)
    before, args = _content(trace), (verb, *(trace if word is TRACE else word for word in READERS[verb]), "--json")
    where = folder / "empty"
    where.mkdir()
    seconds = timed(*args, cwd=where)
    for _ in kills.numbers():
        kills.kill(seconds, *args, cwd=where)
        assert list(where.iterdir()) == []
        assert _content(trace) == before
    assert json.loads(succeeds(*args, cwd=where))


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_captures(folder: Path, kills: Kills, *, python: object) -> None:
    """A captured model's folder is whole or not there; the process that holds the model ends with the command."""
    script = folder / ".model.py"
    script.write_text(
        "import torch\n\n\ndef model():\n    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])\n"
    )
    script.open("a").write("\n\ndef inputs(batch):\n    return torch.empty(batch, 64)\n")
    functions = ("--inputs", "inputs", "--batch", 4, "--python", python)
    kill_writers(folder, kills, writer=(("capture", f"{script}:model", *functions, "--out"), "captured", check_capture))


def kill_recordings(folder: Path, kills: Kills, *, collect: tuple[object, ...], job: tuple[object, ...]) -> None:
    """A recording is whole or not there; ranks, servers and hosts end with the command. `collect`: its options but ``--out``."""
    seconds = timed("collect", *collect, "--out", folder / "trace", "--", *job)
    ranks = Trace.load(folder / "trace").meta.ranks
    for number in kills.numbers():
        out = folder / f"trace{number}"
        kills.kill(seconds, "collect", *collect, "--out", out, "--", *job, earliest_s=min(1.0, seconds / 2))
        if out.exists():
            assert Trace.load(out).meta.ranks == ranks
    timed("collect", *collect, "--out", folder / "again", "--", *job)


def kill_validations(folder: Path, kills: Kills, *, job: tuple[object, ...], options: tuple[object, ...] = ()) -> None:
    """A run folder stays what it was while real runs are killed, and keeps every round that had ended.

    The trace is in ``trace``.
    """
    run = folder / "run"
    succeeds("run", folder / "trace", "--trials", 30, "--out", run)
    before = SearchResult.load(run)
    validate = ("validate", run, "--top", 1, *options, "--", *job)
    seconds, kept = timed(*validate), 0
    for _ in kills.numbers():
        kills.kill(seconds, *validate, earliest_s=min(1.0, seconds / 2))
        assert SearchResult.load(run) == before
        assert json.loads((run / "validation.json").read_bytes())["rounds"] == 2
        rounds = max(whole_lines(run / "rounds.jsonl").count(b"\n") - 1, 0)
        assert rounds >= kept or not (run / "rounds.jsonl").exists(), "a round that had ended is there still"
        kills.tally["rounds kept"] += max(rounds - kept, 0)
        kept = rounds
        if kept == 2:  # the next call has nothing left to run
            assert json.loads(succeeds(*validate[:2], "--json", *validate[2:]))["kept_rounds"] == 2
            kept = 0
    succeeds("report", run, "--out", folder / "page.html")
    timed(*validate)


def whole_lines(path: Path) -> bytes:
    """A journal as far as it was written: a last line may be cut off."""
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


def check_trace(path: Path) -> None:
    assert Trace.load(path).meta.ranks == 2


def check_page(path: Path) -> None:
    assert path.read_text().endswith("</html>\n")


def check_timeline(path: Path) -> None:
    assert json.loads(path.read_bytes())["traceEvents"]


def check_model(path: Path) -> None:
    assert json.loads((path / "model.json").read_bytes())
    assert {model_path.name for model_path in path.iterdir()} == {"model.json", "trees.npz"}


def check_export(path: Path) -> None:
    assert Plan.load(path / "plan.json").tensor_groups == (("a#0", "b#1"),)
    assert {"README.md", "plan.json"} <= {exported_path.name for exported_path in path.iterdir()}


def check_capture(path: Path) -> None:
    assert {captured_path.name for captured_path in path.iterdir()} == {"graph.json", "job.toml"}
    assert json.loads((path / "graph.json").read_bytes())


MODEL = """import torch


def model():
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])


def inputs(batch):
    return torch.empty(batch, 64)
"""
PLAN, TRACE = object(), object()  # stand for the path of a plan's file, and of a trace
READERS: dict[str, tuple[object, ...]] = {
    "describe": ("llama3-8b", "--cluster", "4xhgx-h100"),
    "diagnose": (TRACE,),
    "diff": (TRACE, TRACE),
    "doctor": (),
    "samples": (),
}
WRITERS: dict[str, Writer] = {
    "import": (("import", RAW, "--out"), "trace", check_trace),
    "export": (("export", PLAN, "--out"), "tuned", check_export),
    "fit": (("fit", FEW_CLUSTERS, "--out"), "model", check_model),
    "report": (("report", "--out"), "page.html", check_page),
    "replay": (("replay", "--perfetto"), "timeline.json", check_timeline),
}
