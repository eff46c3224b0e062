"""Elements of a page. Text stays text: the standard library escapes it, and characters that could disguise it are made visible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree

from dpro_search._text import visible

Element = ElementTree.Element
Content = Element | str | None

_LONGEST = 300


def shown(text: str) -> str:
    """Text from a file as it may be shown: without characters that hide, reorder or break it, and not endless."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return visible(text)


def tag(name: str, *content: Content, **attributes: str | float | None) -> Element:
    """An element. ``class_`` stands for class, other underscores for hyphens; None leaves an attribute or a child out."""
    found = {key.rstrip("_").replace("_", "-"): _attribute(value) for key, value in attributes.items() if value is not None}
    element = Element(name, found)
    for child in content:
        if isinstance(child, str):
            if len(element):
                element[-1].tail = (element[-1].tail or "") + shown(child)
            else:
                element.text = (element.text or "") + shown(child)
        elif child is not None:
            element.append(child)
    return element


def raw_text(name: str, text: str, **attributes: str) -> Element:
    """A ``script`` or ``style`` element, whose text is not escaped; raises `ValueError` if the text could end it."""
    if "</" in text or "<!--" in text:
        raise ValueError(f"{name}: holds '</' or '<!--'")
    element = Element(name, attributes)
    element.text = text
    return element


def section(identity: str, title: str, *content: Content) -> Element:
    """A part of the page with a heading, to which the navigation leads."""
    return tag("section", tag("h2", title, id=f"{identity}-title"), *content, id=identity, aria_labelledby=f"{identity}-title")


def paragraph(text: str, class_: str | None = None) -> Element:
    """One paragraph."""
    return tag("p", text, class_=class_)


def name_of(text: str) -> Element:
    """A name from a file: whatever its script, it does not change the order of what stands around it."""
    return tag("bdi", text, class_="name")


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Content]]) -> Element:
    """A table that scrolls by itself where it is too wide. The first column names the row; columns that end in "#" hold numbers."""
    numeric = [column.endswith("#") for column in columns]
    head = tag(
        "tr",
        *(
            tag("th", column.rstrip("#"), scope="col", class_="number" if number else None)
            for column, number in zip(columns, numeric, strict=True)
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag("td" if place else "th", cell, class_="number" if numeric[place] else None, scope=None if place else "row")
                for place, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def details(summary: str, *content: Content) -> Element:
    """What opens on demand: the numbers of a chart."""
    return tag("details", tag("summary", summary), *content)


def figure(chart: Element, caption: str, numbers: Element | None, legend: Element | None = None) -> Element:
    """A chart with its legend, what it says, and a table of its numbers."""
    opened = None if numbers is None else details("Numbers", numbers)
    return tag("figure", tag("figcaption", caption), legend, chart, opened)


def to_text(element: Element) -> str:
    """The element as HTML."""
    return ElementTree.tostring(element, encoding="unicode", method="html")


def _attribute(value: str | float) -> str:
    return shown(value) if isinstance(value, str) else f"{value:.6g}"
