"""What the scripts of this folder share: their command line, rows that survive an interruption, and sections of the page."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from dpro_search.collect._files import write_file
from experiments.dpro.recordings import SYSTEMS, Recording, recordings
from experiments.validation.measure import BASE_RATE, RATES, WORKLOADS

_Row = TypeVar("_Row", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    results: Path  # Folder of rows, sections and pictures.
    folders: tuple[Path, ...] = ()  # Where recordings are.
    memory: Path | None = None  # Recordings of `experiments.costmodel.memory`; None: none.
    real_runs: Path | None = None  # Cases of `experiments.search.testbed`, compared; None: none.
    systems: tuple[str, ...] = tuple(SYSTEMS)
    workloads: tuple[str, ...] = WORKLOADS
    trials: int = 150  # Plans that a search prices.

    def recordings(self, systems: Sequence[str] = tuple(SYSTEMS), links: Sequence[str] = RATES) -> list[Recording]:
        """Recordings of some of the systems and links."""
        wanted = [system for system in systems if system in self.systems]
        return recordings(self.folders, systems=wanted, workloads=self.workloads, links=links)

    def at_base(self, systems: Sequence[str] = tuple(SYSTEMS)) -> list[Recording]:
        """Recordings at the base rate."""
        return self.recordings(systems, (BASE_RATE,))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: what it is called, its text, and its picture as SVG if it has one."""

    name: str
    title: str
    text: str
    picture: str | None = None


Part = Callable[[Options], Section]


def script(part: Part, doc: str | None) -> None:
    """What `python -m` does with one part."""
    options = _parsed(doc)
    print(written(part(options), options.results))


def all_parts(parts: Sequence[Part], doc: str | None) -> tuple[Options, list[str]]:
    """The options, and the sections of all parts in their order."""
    options = _parsed(doc)
    found = []
    for part in parts:
        found.append(written(part(options), options.results))
        print(found[-1], flush=True)
    return options, found


def written(section: Section, results: Path) -> str:
    """Write a section and its picture; returns it as markdown."""
    lines = [f"## {section.title}", "", section.text.strip(), ""]
    if section.picture is not None:
        write_file(results / f"dpro-{section.name}.svg", section.picture.encode())
        lines += [f"![{section.title}](dpro-{section.name}.svg)", ""]
    text = "\n".join(lines)
    write_file(results / f"{section.name}.md", text.encode())
    return text


def gathered(path: Path, kind: type[_Row], jobs: Mapping[str, Callable[[], _Row]]) -> dict[str, _Row]:
    """The row of each job, by its key: from a file, or made and added to it. Whoever wants a row anew removes the file."""
    known = msgspec.json.decode(path.read_bytes(), type=dict[str, kind]) if path.exists() else {}  # type: ignore[valid-type]
    for key, make in jobs.items():
        if key not in known:
            started = time.monotonic()
            known[key] = make()
            write_file(path, msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
            print(f"{path.stem}: {key} ({time.monotonic() - started:.1f} s)", file=sys.stderr, flush=True)
    return {key: known[key] for key in jobs}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; a column whose name ends in "#" is aligned to the right."""
    names = [name.removesuffix("#") for name in columns]
    lines = [f"| {' | '.join(names)} |", "|" + "|".join("---:" if name.endswith("#") else "---" for name in columns) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _parsed(doc: str | None) -> Options:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of the results; what it has already is not computed again")
    parser.add_argument("--recordings", type=Path, nargs="+", default=[], metavar="DIR", help="what experiments.validation wrote")
    parser.add_argument("--memory", type=Path, metavar="DIR", help="what experiments.costmodel.memory recorded")
    parser.add_argument("--real-runs", type=Path, metavar="DIR", help="what experiments.search.testbed ran and compared")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--trials", type=int, default=Options.trials, help="of each search (default: %(default)s)")
    given = parser.parse_args()
    return Options(
        results=given.results,
        folders=tuple(given.recordings),
        memory=given.memory,
        real_runs=given.real_runs,
        systems=tuple(given.systems),
        workloads=tuple(given.workloads),
        trials=given.trials,
    )
