"""Hook of mkdocs: links that leave the folder of pages, which are good in the repository, become plain text in the built pages.

A link to a report (``experiments/search/README.md``) keeps its path, so that a reader of the built pages can find it.
"""

from __future__ import annotations

import re
from typing import Any

_UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]*)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **context: Any) -> str:
    """A page's text before it is rendered, without links that leave the folder of pages."""
    depth = page.file.src_uri.count("/")

    def kept(link: re.Match[str]) -> str:
        text, ups, path = link.groups()
        if ups.count("../") <= depth:
            return link[0]
        return f"{text} (`{path}`)" if path.endswith(".md") else text

    return _UPWARDS.sub(kept, markdown)
