"""Links of the README, SKILL.md, the pages of docs/ and the reports beside them lead somewhere."""

import re
from pathlib import Path

from tests.every_case import every_case

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SKILL.md",
    ROOT / "docs" / "llms.txt",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "dpro_search").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
DOCS_LIMIT_BYTES = 120_000  # pages for users and contributors; measurements belong to the reports

_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def headings(page):
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    without_blocks = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in _HEADING.findall(without_blocks)}


@every_case("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


def test_the_pages_stay_short_enough_to_read():
    assert sum(page.stat().st_size for page in (ROOT / "docs").rglob("*.md")) < DOCS_LIMIT_BYTES
