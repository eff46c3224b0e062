"""All plans of a described job in a real browser: filters, pointer, keys, what a screen reader hears, and ten thousand plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from report.browser import Page, chromium
from report.test_browser import _LEAST_CONTRAST, _OPENED, _WIDEST, written
from report.test_planner import facts, planner, run

from dpro_search.parallel.answers.priced import PricedPlan
from dpro_search.parallel.schedule import V_SHAPED, Schedule
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.steps.step_costs import LayerCosts, StepCosts
from dpro_search.parallel.steps.step_graph import step_graph
from dpro_search.parallel.strategy import Strategy
from dpro_search.replay.engine import ends_us
from dpro_search.report import render
from dpro_search.report.planner import Planner, order_texts
from tests.in_process import dpro

__all__ = ["facts", "planner", "run"]  # fixtures
pytestmark = [pytest.mark.integration, pytest.mark.one_core]

_CANVAS = "document.getElementById('planner-canvas')"
_STATE = f"{_CANVAS}.planner"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def text(facts) -> str:
    return render(facts)


@pytest.fixture
def page(browser, text, tmp_path) -> Page:
    browser.open(written(tmp_path, text))
    return browser


def shown(page: Page) -> list[int]:
    return page.evaluate(f"{_STATE}.scatter.shown")


def choose(page: Page, setting: str, value: str) -> None:
    """Click a value of a setting, as a person finds it: by the names of the group and of the box."""
    page.evaluate(
        "((setting, value) => { const named = e => e.querySelector('legend').textContent === setting;"
        " const group = [...document.querySelectorAll('#planner-filters fieldset')].find(named);"
        " [...group.querySelectorAll('label')].find(e => e.textContent === value).click(); })"
        f"({json.dumps(setting)}, {json.dumps(value)})"
    )


def test_nothing_complains_and_nothing_is_loaded(page):
    assert page.complaints == []
    assert page.evaluate("document.getElementById('planner-static').hidden")
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0


def test_a_filter_acts_on_the_chart_and_on_the_table(page, planner):
    choose(page, "tensor parallel (tp)", "4")
    expected = [place for place, one in enumerate(planner.plans) if one.strategy.tp == 4]
    assert 0 < len(expected) < len(planner.plans)
    assert shown(page) == expected
    rows = page.evaluate("[...document.querySelectorAll('#planner-table tbody button')].map(e => e.textContent)")
    assert len(rows) == min(25, len(expected))
    assert all("tp 4" in row for row in rows)
    assert f"{len(expected)} of {len(planner.plans)} plans" in page.evaluate("document.getElementById('planner-count').textContent")
    page.evaluate("document.getElementById('planner-reset').click()")
    assert len(shown(page)) == len(planner.plans)


def test_filters_hold_together_and_values_of_one_setting_are_alternatives(page, planner):
    for setting, value in (("tensor parallel (tp)", "1"), ("tensor parallel (tp)", "2"), ("memory", "fits")):
        choose(page, setting, value)
    limit = planner.searched_bytes
    assert shown(page) == [
        place
        for place, one in enumerate(planner.plans)
        if one.strategy.tp in (1, 2) and one.prediction.infeasible is None and one.prediction.peak_memory_bytes <= limit
    ]


def test_a_slider_takes_the_slowest_plans_away(page, planner):
    page.evaluate("""(s => { s.value = 300; s.dispatchEvent(new Event('input', {bubbles: true})); })
      (document.querySelector('#planner-filters input[type=range]'))""")
    places = shown(page)
    assert places == list(range(len(places)))
    assert 0 < len(places) < len(planner.plans)
    assert page.evaluate("document.querySelector('#planner-filters input[type=range]').getAttribute('aria-valuetext')").endswith(
        "s"
    )


def test_a_click_shows_the_plan_and_its_line_is_what_replay_answers(page, planner, run):
    page.evaluate(f"{_CANVAS}.scrollIntoView({{block: 'center'}})")
    places = page.evaluate(f"{_STATE}.scatter.places")
    x, y = page.evaluate(f"(b => [b.left, b.top])({_CANVAS}.getBoundingClientRect())")
    slowest = max(places, key=lambda place: planner.plans[place["plan"]].prediction.iteration_us)
    page.drag((x + slowest["x"], y + slowest["y"]), (x + slowest["x"], y + slowest["y"]))
    one = planner.plans[page.evaluate(f"{_STATE}.scatter.chosen")]
    assert one.plan == planner.plans[slowest["plan"]].plan
    assert one.text in page.evaluate("document.getElementById('planner-plan-title').textContent")
    command = page.evaluate("document.getElementById('planner-command').textContent").split()
    assert command[:2] == ["dpro-search", "replay"]
    replayed = dpro(*command[1:], "--json")
    assert json.loads(replayed.stdout)["predicted_iteration_us"] == pytest.approx(one.prediction.iteration_us, rel=1e-9)


def test_the_line_of_every_plan_is_what_replay_answers(page, planner):
    commands = page.evaluate(f"Array.from({{length: {len(planner.plans)}}}, (_, plan) => {_STATE}.plans.commandOf(plan))")
    for one, command in list(zip(planner.plans, commands, strict=True))[::9]:
        replayed = dpro(*command.split()[1:], "--json")
        assert json.loads(replayed.stdout)["predicted_iteration_us"] == pytest.approx(one.prediction.iteration_us, rel=1e-9), (
            command
        )


def test_parts_and_memory_of_the_card_are_those_of_the_plan(page, planner):
    for place, one in list(enumerate(planner.plans))[::11]:
        shares = page.evaluate(f"{_STATE}.plans.partsOf({place}).map(part => part.share)")
        expected = [us / one.prediction.iteration_us for us in one.parts_us.values()]
        assert sorted(shares)[-3:] == pytest.approx(sorted(expected)[-3:], abs=1e-4)
        memory = page.evaluate(f"{_STATE}.plans.memoryOf({place}).map(part => part.share)")
        assert sum(memory) == pytest.approx(1, abs=1e-3)


def test_keys_go_from_plan_to_plan_say_each_and_choose_one(page, planner):
    page.evaluate(f"{_CANVAS}.focus()")
    page.press("Home", "ArrowUp", "ArrowUp")
    assert page.evaluate(f"{_STATE}.scatter.focus") == 2
    assert planner.plans[2].text in page.evaluate("document.getElementById('planner-focus').textContent")
    page.press("Enter")
    assert planner.plans[2].text in page.evaluate("document.getElementById('planner-plan-title').textContent")
    page.press("ArrowLeft")
    place = page.evaluate(f"{_STATE}.scatter.focus")
    assert planner.plans[place].prediction.peak_memory_bytes <= planner.plans[2].prediction.peak_memory_bytes


def test_the_focus_goes_through_filters_chart_card_and_table_in_this_order(page):
    order = page.evaluate("""[...document.querySelectorAll(
      '#planner-app input, #planner-app canvas, #planner-copy, #planner-table button')]
      .map(e => e.closest('form, figure, #planner-plan, #planner-table').id || 'chart')""")
    assert [*dict.fromkeys(order)] == ["planner-filters", "chart", "planner-plan", "planner-table"]
    page.evaluate("document.querySelector('#planner-table button').click()")
    assert page.evaluate("document.activeElement.id") == "planner-plan-title"


def test_everything_that_can_be_focused_has_a_name(page):
    named = page.named()
    interactive = [row for row in named if row[0] in {"button", "checkbox", "slider", "application", "link", "combobox"}]
    assert {"button", "checkbox", "slider", "application"} <= {role for role, _ in interactive}
    assert [row for row in interactive if not row[1].strip()] == []
    groups = {name for role, name in named if role == "group"}
    assert {"tensor parallel (tp)", "memory"} <= groups


def test_the_copy_button_says_what_happened(page):
    page.evaluate("document.getElementById('planner-copy').click()")
    said = "document.querySelector('.command [role=status]').textContent"
    assert page.evaluate(f"new Promise(done => setTimeout(() => done({said}), 300))")
    assert page.evaluate("getSelection().toString()") == page.evaluate("document.getElementById('planner-command').textContent")


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_a_phone_too(browser, text, tmp_path, dark):
    browser.open(written(tmp_path, text), width=400, height=800, phone=True, dark=dark)
    browser.evaluate(_OPENED)
    assert browser.evaluate(_WIDEST) <= 400
    assert browser.evaluate(_LEAST_CONTRAST) >= 4.5


def test_without_javascript_the_fastest_plans_are_shown(browser, text, tmp_path):
    browser.scripts(enabled=False)
    try:
        browser.load(written(tmp_path, text))
        named = browser.named()
    finally:
        browser.scripts(enabled=True)
    assert "The fastest plans" in {name for _, name in named}
    assert "application" not in {role for role, _ in named}


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages"),
    [
        (Schedule.GPIPE, 4, 1),
        (Schedule.ONE_F_ONE_B, 4, 1),
        (Schedule.INTERLEAVED, 4, 3),
        (Schedule.ZERO_BUBBLE, 4, 1),
        (Schedule.ZERO_BUBBLE_V, 4, 2),
        (Schedule.DUAL_PIPE_V, 3, 2),
        (Schedule.DUAL_PIPE, 4, 1),
    ],
)
def test_a_drawn_pipeline_takes_as_long_as_a_replayed_one(page, schedule, ranks, stages):
    copies = 2 if schedule is Schedule.DUAL_PIPE else 1
    strategy = Strategy(pp=ranks, schedule=schedule, virtual_stages=stages, global_batch=3 * ranks)
    durations = [(1, 10.0 + number, 21.0 + number, 9.0) for number in range(ranks * stages)] * copies
    layers = tuple(
        (LayerCosts(forward_us=forward, backward_us=back, weights_us=weights),) for _, forward, back, weights in durations
    )
    send_us = 0.0 if schedule in V_SHAPED else 0.5  # where the replay has messages of both halves on one link
    costs = StepCosts(stages=layers, send_us=send_us, copies=copies)
    expected = float(ends_us(step_graph(costs, pipeline_orders(schedule, ranks, stages, 3 * ranks)), 1)[0])
    orders, value = json.dumps(order_texts(strategy)), json.dumps(schedule.value)
    drawn = page.evaluate(f"(r => [r.end, r.whole])(replayed({orders}, {value}, {json.dumps(durations)}, {send_us}))")
    assert drawn == [pytest.approx(expected), True]


def ten_thousand(planner: Planner) -> Planner:
    """As many plans with other settings, times and memory: the plans of a real search over and over, each a little different."""
    rng, plans = np.random.default_rng(1), list[PricedPlan]()
    for number in range(10_000):
        one = planner.plans[number % len(planner.plans)]
        factor = rng.uniform(1, 3)
        prediction = msgspec.structs.replace(
            one.prediction,
            iteration_us=one.prediction.iteration_us * factor,
            peak_memory_bytes=int((one.prediction.peak_memory_bytes or 0) * rng.uniform(0.5, 2)),
        )
        strategy = replace(one.strategy, prefetch_layers=int(rng.integers(1, 64)), recompute_layers=int(rng.integers(0, 40)))
        stages = tuple(equal._replace(forward_us=round(equal.forward_us * factor, 1)) for equal in one.stages)
        text = f"{one.text}, {strategy.prefetch_layers} and {strategy.recompute_layers}"
        plans.append(replace(one, strategy=strategy, prediction=prediction, stages=stages, text=text))
    return replace(planner, plans=sorted(plans, key=lambda one: one.prediction.iteration_us))


def test_ten_thousand_plans_are_less_than_three_megabytes_and_can_be_filtered(browser, facts, planner, tmp_path):
    path = written(tmp_path, render(replace(facts, planner=ten_thousand(planner))))
    assert path.stat().st_size < 3_000_000
    browser.open(path)
    assert browser.complaints == []
    assert len(shown(browser)) == 10_000
    choose(browser, "tensor parallel (tp)", "2")
    places = shown(browser)
    assert 0 < len(places) < 10_000
    column = f"(s => s.values[s.column[{places[-1]}]])({_STATE}.plans.settings.find(s => s.name === 'tp'))"
    assert browser.evaluate(column) == 2
