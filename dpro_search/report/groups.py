"""The section about messages: how large they are in each setting, and which tensors they carry."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.report import units
from dpro_search.report.charts import BarPart, stacked
from dpro_search.report.html import Element, Section, details, figure, name_of, table
from dpro_search.space.tensor_groups import Group, TensorGroups

_SHOWN_NAMES = 4
_SHOWN_ROWS = 500  # of a table; a job with priority slices sends thousands


def groups_section(settings: TensorGroups | None) -> Section | None:
    """Bars of messages, one a setting, on a common scale of bytes; None if nothing is known."""
    if settings is None or not settings.groups:
        return None
    noun = settings.noun
    rows = []
    for setting, groups in settings.groups.items():
        whole = sum(group.size_bytes for group in groups)
        value = f"{units.count(len(groups), noun)} · {units.size(whole)}"
        rows.append((setting, value, [_part(number, group) for number, group in enumerate(groups)]))
    caption = f"Each block is one {noun} of a step, in order; its width is its size. Two tones tell neighbours apart."
    caption += f" {settings.note}" if settings.note else ""
    tables = [details(f"Numbers: {setting}", _table(setting, groups, noun)) for setting, groups in settings.groups.items()]
    chart = figure(stacked(f"{noun}s by bytes", rows), caption, None)
    return Section("groups", f"Sizes of {noun}s", [chart, *tables])


def _part(number: int, group: Group) -> BarPart:
    tip = f"{units.count(group.count, 'tensor')}, {units.size(group.size_bytes)}{_names(group, ': ')}"
    return BarPart(length=float(group.size_bytes), kind=f"tone-{number % 2}", tip=tip)


def _table(setting: str, groups: Sequence[Group], noun: str) -> Element:
    shown = groups[:_SHOWN_ROWS]
    rows = ((str(n), str(g.count), units.size(g.size_bytes), name_of(_names(g))) for n, g in enumerate(shown))
    title = f"{noun.capitalize()}s, {setting}" + (f" (the first {len(shown)} of {len(groups)})" if len(shown) < len(groups) else "")
    return table(title, (noun, "tensors#", "size#", "first tensors"), rows)


def _names(group: Group, before: str = "") -> str:
    more = len(group.tensors) - _SHOWN_NAMES
    named = ", ".join(group.tensors[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
    return before + named if named else ""
