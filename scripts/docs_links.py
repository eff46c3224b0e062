"""Hook of mkdocs: links to source files, which are good on a page of the repository, become plain text in the built pages."""

from __future__ import annotations

import re
from typing import Any

_TO_SOURCE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!docs/)[^)]*\)")


def on_page_markdown(markdown: str, **context: Any) -> str:
    """A page's text before it is rendered."""
    return _TO_SOURCE.sub(r"\1", markdown)
