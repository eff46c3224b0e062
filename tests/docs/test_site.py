"""The pages of docs/ as mkdocs builds them: no dead link, a search that finds, colours for the dark, tables that fit a phone."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from report.browser import Page, chromium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_link_of_a_built_page_is_dead(site):
    dead = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text("utf-8")):
            path = unquote(link.partition("#")[0].partition("?")[0])
            if path and not re.match(r"[a-z]+:|/", path):
                target = page.parent / path
                if not (target / "index.html" if path.endswith(("/", ".")) else target).exists():
                    dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_the_search_knows_every_verb_and_term(site):
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    pages_with_the_option = {entry["location"].partition("#")[0] for entry in entries if "--holdout-step" in entry["text"]}
    assert "cli/" in pages_with_the_option
    assert any(entry["location"] == "cli/#validate" for entry in entries)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *about: object) -> None:
        pass


class _Address:
    """An address where `Page.open` expects a file."""

    def __init__(self, address: str) -> None:
        self.address = address

    def resolve(self) -> "_Address":
        return self

    def as_uri(self) -> str:
        return self.address


@pytest.fixture(scope="module")
def served(site) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.integration
@pytest.mark.one_core
@pytest.mark.parametrize("name", ["", "tutorial/", "cli/", "formats/", "clusters/", "howto/python/"])
def test_a_page_fits_a_phone_and_has_a_dark_side(page, served, name):
    page.open(_Address(served + name), width=390, height=844, phone=True)
    wide = "[...document.querySelectorAll('html, .wy-table-responsive')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert page.evaluate(wide) == 0
    ink = "getComputedStyle(document.querySelector('.rst-content')).color"
    page.open(_Address(served + name))
    assert page.evaluate(ink) == "rgb(64, 64, 64)"
    page.open(_Address(served + name), dark=True)
    assert page.evaluate(ink) == "rgb(230, 228, 220)"
