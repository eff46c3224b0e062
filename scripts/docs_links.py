"""Hook of mkdocs: links to source files, which are good on a page of the repository, become plain text in the built pages."""

from __future__ import annotations

import re
from typing import Any

_UPWARDS = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **context: Any) -> str:
    """A page's text before it is rendered, without links that leave the folder of pages."""
    depth = page.file.src_uri.count("/")

    def kept(link: re.Match[str]) -> str:
        return link[0] if link[2].count("../") <= depth else link[1]

    return _UPWARDS.sub(kept, markdown)
