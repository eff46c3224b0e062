"""The page in a real browser: no complaint, charts that hold data, names that stay text, phones, the dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from report import made
from report.browser import Page, chromium

from dpro_search.report import render
from dpro_search.report.html import shown

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

_OPENED = "document.querySelectorAll('details').forEach(part => part.open = true)"
_WIDEST = """Math.max(document.documentElement.scrollWidth, ...[...document.querySelectorAll('main *')]
    .filter(e => !e.closest('.scroll') && !e.closest('svg')).map(e => e.getBoundingClientRect().right))"""
_FLAT = """[...document.querySelectorAll('svg.bar rect, svg.plane circle')]
    .filter(e => e.getBoundingClientRect().width <= 0 || e.getBoundingClientRect().height <= 0).length"""
_COLOURS = "(() => { const c = document.getElementById('timeline-canvas'); const d = c.getContext('2d')"
_COLOURS += """.getImageData(0, 0, c.width, c.height).data; const found = new Set();
    for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) found.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
    return [...found]; })()"""
_LEAST_CONTRAST = """(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const texts = [...document.querySelectorAll('main *, header *')].filter(e => e.offsetParent && !e.closest('.skip')
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  return Math.min(...texts.map(e => { const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); }));
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    facts = replace(
        made.facts(),
        search=made.search(made.plan(0, 80e3), made.plan(1, 85e3)),
        trials=made.trials(),
        validation=made.validation(1.2, beyond_noise=True),
    )
    return written(tmp_path, render(facts))


def written(folder: Path, text: str) -> Path:
    path = folder / "page.html"
    path.write_text(text, "utf-8")
    return path


def test_nothing_complains_and_nothing_is_loaded(page, searched):
    page.open(searched)
    assert page.complaints == []


def test_every_chart_holds_data(page, searched):
    page.open(searched)
    assert page.evaluate("document.querySelectorAll('svg.bar rect').length") > 10
    assert page.evaluate("document.querySelectorAll('svg.plane circle').length") >= 8
    assert page.evaluate(_FLAT) == 0
    assert len(page.evaluate(_COLOURS)) > 3
    assert page.evaluate("document.getElementById('timeline-canvas').dataset.slices") == "164"


@pytest.mark.parametrize("name", made.HOSTILE)
def test_hostile_names_stay_text(page, tmp_path, name):
    page.open(written(tmp_path, render(made.hostile_facts(name))))
    assert page.complaints == []
    assert page.evaluate("document.querySelectorAll('img, svg[onload], main script, b').length") == 0
    assert page.evaluate("document.querySelector('h1').textContent") == shown(name)
    assert page.evaluate("document.getElementById('timeline-canvas').timeline.data.names[0]") == shown(name)


@pytest.mark.parametrize("name", ["gemm", "long_name_without_a_break" * 8])
def test_a_phone_need_not_scroll_sideways(page, tmp_path, name):
    page.open(written(tmp_path, render(made.hostile_facts(name))), width=360, height=780, phone=True)
    page.evaluate(_OPENED)
    assert page.evaluate("innerWidth") == 360
    assert page.evaluate(_WIDEST) <= 360


def test_the_dark_has_other_colours(page, searched):
    seen = []
    for dark in (False, True):
        page.open(searched, dark=dark)
        body = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
        seen.append((*body, set(page.evaluate(_COLOURS))))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]
    assert seen[0][2] != seen[1][2]


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_against_what_is_behind_it(page, searched, dark):
    page.open(searched, dark=dark)
    page.evaluate(_OPENED)
    assert page.evaluate(_LEAST_CONTRAST) >= 4.5  # WCAG 2.2, level AA


def middle(page: Page) -> tuple[float, float]:
    page.evaluate("document.getElementById('timeline-canvas').scrollIntoView({block: 'center'})")
    box = page.evaluate(
        "(b => [b.left + b.width / 2, b.top + 50])(document.getElementById('timeline-canvas').getBoundingClientRect())"
    )
    return box[0], box[1]


def shown_span(page: Page) -> list[float]:
    return page.evaluate("(t => [t.from, t.span])(document.getElementById('timeline-canvas').timeline)")


def test_the_timeline_zooms_at_the_pointer_moves_and_comes_back(page, searched):
    page.open(searched, height=1200)
    x, y = middle(page)
    first, whole = shown_span(page)
    page.wheel(x, y, -300, ctrl=True)
    start, span = shown_span(page)
    assert first < start
    assert span < 0.6 * whole
    page.drag((x, y), (x + 60, y))
    assert shown_span(page)[0] < start
    page.evaluate("document.querySelector('[data-act=all]').click()")
    assert shown_span(page) == [first, whole]


def test_a_wheel_without_a_key_scrolls_the_page(page, searched):
    page.open(searched, height=1200)
    before = shown_span(page)
    page.wheel(*middle(page), 100)
    assert shown_span(page) == before


def test_a_pointer_on_a_slice_tells_its_name(page, searched):
    page.open(searched, height=1200)
    x, y = middle(page)
    page.point(x, y)
    assert "op 1" in page.evaluate("document.getElementById('tip').textContent")


def test_one_rank_can_be_chosen(page, searched):
    page.open(searched)
    script = "(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('timeline-rank'))"
    page.evaluate(script)
    ranks = page.evaluate("document.getElementById('timeline-canvas').timeline.lanes.map(lane => lane.rank)")
    assert set(ranks) == {1}


def test_fifty_thousand_ops_are_all_there_and_can_be_zoomed(page, tmp_path):
    facts = replace(made.facts(), timeline=made.timeline(slices=12_500))
    page.open(written(tmp_path, render(facts)), height=1200)
    assert page.complaints == []
    assert page.evaluate("document.getElementById('timeline-canvas').dataset.slices") == "50004"
    x, y = middle(page)
    for _ in range(12):
        page.wheel(x, y, -100, ctrl=True)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.point(x, y)
    page.point(x + 1, y)
    assert "op 54" in page.evaluate("document.getElementById('tip').textContent")
    assert len(page.evaluate(_COLOURS)) > 3


def test_no_table_is_clipped_on_a_phone(page, searched):
    page.open(searched, width=390, height=844, phone=True)
    page.evaluate("document.querySelectorAll('details').forEach(found => { found.open = true; })")
    clipped = "[...document.querySelectorAll('.scroll')].filter(found => found.scrollWidth > found.clientWidth + 1).length"
    assert page.evaluate(clipped) == 0
    label = "getComputedStyle(document.querySelector('#plans tbody td'), '::before').content"
    assert page.evaluate(label) == '"predicted"', "the column's name stands beside the value"


_ALIKE = """[...document.querySelectorAll('.legend')].filter(legend => {
  const parts = [...legend.querySelectorAll('.swatch.part, .swatch.compute, .swatch.comm')];
  const looks = parts.map(e => getComputedStyle(e).backgroundColor);
  return new Set(looks).size < looks.length; }).length"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_name_of_a_legend_has_its_own_colour(page, tmp_path, dark):
    page.open(written(tmp_path, render(made.facts())), dark=dark)
    assert page.evaluate("document.querySelectorAll('.legend').length") > 1
    assert page.evaluate(_ALIKE) == 0
