"""`Setting`: everything that follows from a setting of parallel jobs, and how a field of `Strategy` declares it (`about`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Strategy = Any  # `parallel.strategy.Strategy`, whose module declares its fields with this one


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that follows from a setting beside prices and memory."""

    words: Callable[[Any], str]  # A value in a few words.
    note: str  # Comment of its line in a job.toml.
    # Its line in a job.toml, commented out, of a setting that most jobs leave alone; None: its value is written.
    example: str | None = None
    label: str = ""  # What the page calls it; empty: its name.
    least: int | None = None  # The lowest value; None: no number, or any.
    # Another setting and how large it must be for this one to have an effect. Where it has none, it is its default, but for those
    # that are `kept` as they are set.
    needs: tuple[str, int] | None = None
    kept: bool = False
    of_experts: bool = False  # Whether only models with experts have it.
    neutral: bool = False  # Whether the default is no effect, which the page shows as a dash.
    # Its value where nothing sets it, as a function of the other settings, the number of devices and the framework's ZeRO stage;
    # None: its default.
    usual: Callable[[Mapping[str, Any], int, int], Any] | None = None
    follows: tuple[str, ...] = ()  # Settings with whose change it becomes what it is where nothing sets it.
    detail: bool = False  # Whether a list of different plans has only one of those that differ in it alone.
    said: Callable[[Strategy], bool] | None = None  # Whether the text of a whole strategy says it; None: unless it is its default.
    # Other values that a diagnosis tries; and values that need less memory, or several settings together that do.
    changes: Callable[[Strategy], Iterable[Any]] = lambda strategy: ()
    saves: Callable[[Strategy], Iterable[Any]] = lambda strategy: ()


def about(words: str | Callable[[Any], str], note: str, example: str | None = None, **more: Any) -> dict[str, Setting]:
    """Metadata of a field of `Strategy`; `words` may be a template, or two texts, for true and for false, with a bar between."""
    if isinstance(words, str):
        yes, _, no = words.partition("|")
        words = (lambda value: yes if value else no) if no else yes.format
    return {"setting": Setting(words=words, note=note, example=example, **more)}


def plain(value: Any) -> Any:
    """A value of a strategy as settings have it: names in place of members of an enumeration."""
    return value.value if isinstance(value, Enum) else value


def doubled(name: str) -> Callable[[Strategy], Iterable[int]]:
    """Twice a value, and half of it."""

    def values(strategy: Strategy) -> Iterable[int]:
        value = getattr(strategy, name)
        return (value * 2, value // 2) if value > 1 else (value * 2,)

    return values


def times(name: str) -> Callable[[Strategy], Iterable[int]]:
    return lambda strategy: [getattr(strategy, name) * factor for factor in (2, 4, 8)]


def first_layers(count: int) -> str:
    return "the first layer of each stage" if count == 1 else f"the first {count} layers of each stage"


def repeated(counts: Sequence[int]) -> str:
    """Numbers as ``--set`` takes them, with how often each comes in a row: "7,14x8,7"."""
    groups = [(value, len(list(same))) for value, same in itertools.groupby(counts)]
    return ",".join(f"{value}x{times}" if times > 1 else str(value) for value, times in groups)
