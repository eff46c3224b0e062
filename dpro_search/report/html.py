"""Elements of a page, drawn by the macros of ``templates/``: jinja2 escapes all text, and characters that disguise it are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from dpro_search._text import visible

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from markupsafe import Markup

_LONGEST = 600


class Element(Protocol):
    """Text that is HTML already."""

    def __html__(self) -> str:
        """The HTML."""


Content = Element | str | None


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading, to which the navigation leads."""

    identity: str
    title: str
    content: Sequence[Content]

    def __html__(self) -> str:
        return element("section", self.identity, self.title, self.content)


def shown(text: str) -> str:
    """Text from a file as it may be shown: without characters that hide, reorder or break it, and not endless."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return visible(text)


def element(macro: str, *values: object, of: str = "elements") -> Markup:
    """The HTML that a macro of a template makes from values."""
    drawn: Markup = getattr(template(of).module, macro)(*values)
    return drawn


def unescaped(text: str) -> Markup:
    """The text of a ``script`` or ``style`` element; raises `ValueError` if the text could end it."""
    from markupsafe import Markup

    if "</" in text or "<!--" in text:
        raise ValueError("the text of a script or style holds '</' or '<!--'")
    return Markup(text)


def paragraph(text: str, class_: str | None = None) -> Element:
    """One paragraph."""
    return element("paragraph", text, class_)


def name_of(text: str, tip: str | None = None) -> Element:
    """A name from a file: whatever its script, it does not change the order of what stands around it. `tip`: the full name."""
    return element("name", text, tip)


def bullets(texts: Sequence[str]) -> Element:
    """A list of sentences, which may hold names from a file."""
    return element("bullets", texts)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Content]]) -> Element:
    """A table that scrolls by itself where it is too wide. The first column names the row; columns that end in "#" hold numbers."""
    return element("table", caption, columns, list(rows))


def details(summary: str, content: Content) -> Element:
    """An element that opens on demand, such as the numbers of a chart."""
    return element("details", summary, content)


def figure(chart: Element, caption: str, numbers: Element | None, legend: Sequence[tuple[str, str]] = ()) -> Element:
    """A chart with the names of its colours, (class, name) each, with its caption, and with a table of its numbers."""
    return element("figure", chart, caption, numbers, legend)


def to_text(*elements: Element) -> str:
    """The elements as HTML."""
    return "".join(part.__html__() for part in elements)


def template(name: str) -> Template:
    """A template of the report, by its name without endings."""
    return environment().get_template(f"{name}.html.j2")


@cache
def environment() -> Environment:
    """The environment of the templates.

    A value that a template names but does not receive raises an error. No template can pass text on unescaped.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("dpro_search.report"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    templates.filters.clear()  # so that no template can declare a text safe, which would let it past `_finalize`
    return templates


def _finalize(value: object) -> object:
    """The text that a template writes for a value.

    Text is reduced to what may be shown; HTML was made by a template from such text.
    """
    return value if hasattr(value, "__html__") else shown(str(value))
