"""The page as text: what it says, and that what it was given stays text."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from report import made

from dpro_search.deploy.validate import FailedPlan, RefusedPlan
from dpro_search.kinds._diagnosis import PredictedGain, RankFacts
from dpro_search.report import render, units
from dpro_search.report.html import environment, shown, unescaped
from dpro_search.report.timeline import Lane, StepTimeline
from dpro_search.space.plan import Plan
from tests.every_case import every_case


class Outline(HTMLParser):
    """Tags, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def searched(**fields):
    return replace(made.facts(), search=made.search(made.plan(0, 80e3)), trials=made.trials(), **fields)


def diagnosed(**fields):
    return replace(made.facts(), diagnosis=structs.replace(made.facts().diagnosis, **fields))


def test_a_search_has_all_sections_in_order():
    headings = [attributes["id"] for attributes in Outline(render(searched())).named("section")]
    assert headings == ["headline", "plans", "breakdown", "timeline", "path", "groups", "search", "quality", "provenance"]


def test_a_recording_has_no_sections_of_a_search():
    sections = {attributes["id"] for attributes in Outline(render(made.facts())).named("section")}
    assert not {"plans", "search"} & sections
    assert "98.0 ms" in Outline(render(made.facts())).text


def test_a_gain_that_real_runs_proved_is_called_proved():
    text = Outline(render(searched(validation=made.validation(1.3, beyond_noise=True)))).text
    assert "Confirmed by real runs" in text
    assert "1.30\u00d7 faster than recorded" in text
    assert "95 % interval 1.28 to 1.32" in text


@pytest.mark.parametrize("speedup", [1.01, 0.8])
def test_a_gain_within_the_noise_is_said_not_to_be_certain(speedup):
    text = Outline(render(searched(validation=made.validation(speedup, beyond_noise=speedup < 1)))).text
    assert "Not a certain gain" in text
    assert "faster than recorded" not in text.split("Best plans")[0]


def test_a_gain_that_was_only_predicted_says_so():
    text = Outline(render(searched())).text
    assert "predicted, 95.0 to 105.0 ms; measured 98.0 ms" in text, "the recording was measured, before any validation"
    assert "measured in the recording" in text
    assert "Predicted, not yet measured" in text
    assert "predicted, 1.13 to 1.38" in text  # of the ends of both intervals


def test_predicted_intervals_that_overlap_are_not_a_certain_gain():
    facts = replace(made.facts(), search=made.search(made.plan(0, 99e3, certain=False)), trials=made.trials())
    assert "Not a certain gain" in Outline(render(facts)).text


def test_a_large_gain_that_is_not_certain_is_to_be_measured():
    search = structs.replace(made.search(made.plan(0, 80e3, certain=False)), worth_measuring=True)
    text = Outline(render(replace(made.facts(), search=search, trials=made.trials()))).text
    assert "faster than the recorded setting is predicted, but not certain" in text
    assert "Not a certain gain" in text


def test_an_error_that_rounds_to_zero_has_no_sign():
    assert [units.signed_percent(value) for value in (-0.04, 0.04, -0.05001, 3.2)] == [
        "0.0 %",
        "0.0 %",
        "\N{MINUS SIGN}0.1 %",
        "+3.2 %",
    ]
    assert (units.percent(-0.01), units.duration(-1e-9), units.size(-0.1)) == ("0.0 %", "0.0 \N{MICRO SIGN}s", "0 B")


def test_the_critical_path_is_summed_up_in_the_words_of_people():
    path = tuple(made.segment(kind, 0, 0.0, us) for kind, us in (("HOST", 70e3), ("COMM", 20e3), ("IO", 10e3)))
    text = Outline(render(diagnosed(critical_path=path))).text
    assert "longest first: host (CPU) 70.0 %, communication 20.0 %, copies and input 10.0 %." in text


def test_kernels_have_short_names_and_their_full_name_as_tooltip():
    kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int, float)@0"
    outline = Outline(render(made.facts(op=kernel)))
    assert "vectorized_elementwise_kernel<AddFunctor>@0" in outline.texts
    assert kernel in [attributes.get("data-tip") for attributes in outline.named("bdi")]


def test_every_chart_has_a_name_and_a_table():
    outline = Outline(render(searched(validation=made.validation(1.3, beyond_noise=True))))
    assert all(svg.get("aria-label") or svg.get("aria-hidden") for svg in outline.named("svg") if svg.get("class") != "anchor")
    assert len(outline.named("table")) >= len(outline.named("figure"))
    assert all(canvas["aria-label"] for canvas in outline.named("canvas"))


def test_headings_have_no_gaps_and_ids_are_unique():
    outline = Outline(render(searched()))
    levels = [int(tag[1]) for tag, _ in outline.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)


def test_the_page_names_nothing_to_load():
    outline = Outline(render(searched()))
    assert not outline.named("link")
    assert not outline.named("img")
    assert all("src" not in script for script in outline.named("script"))
    assert all(link["href"].startswith("#") for link in outline.named("a"))
    policy = next(meta["content"] for meta in outline.named("meta") if meta.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


@functools.cache
def plain_outline() -> Outline:
    """The page about a job with an ordinary name."""
    return Outline(render(made.hostile_facts("gemm")))


@every_case("name", made.HOSTILE)
def test_a_hostile_name_adds_no_element_and_no_attribute(name):
    plain, hostile = plain_outline(), Outline(render(made.hostile_facts(name)))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert [set(attributes) for _, attributes in hostile.tags] == [set(attributes) for _, attributes in plain.tags]
    assert shown(name) in hostile.texts


@given(st.text(max_size=40))
def test_no_text_leaves_its_element(name):
    tags = [tag for tag, _ in Outline(render(made.hostile_facts(name))).tags]
    assert tags == [tag for tag, _ in plain_outline().tags]


def test_a_template_cannot_forget_to_escape_or_to_show():
    drawn = environment().from_string("{% macro m(x) %}<i>{{ x }}</i>{% endmacro %}<b title='{{ x }}'>{{ m(x) }}</b>")
    assert drawn.render(x="<'\u202e\x1b") == "<b title='&lt;&#39;\\u{202e}\\u{1b}'><i>&lt;&#39;\\u{202e}\\u{1b}</i></b>"
    with pytest.raises(jinja2.TemplateAssertionError, match="safe"):
        environment().from_string("{{ x | safe }}")


@pytest.mark.parametrize("name", environment().list_templates())
def test_no_template_turns_escaping_off_or_joins_texts_itself(name):
    source, _, _ = environment().loader.get_source(environment(), name)
    joins = (jinja2.nodes.Concat, jinja2.nodes.Add, jinja2.nodes.Mod)  # with HTML they make HTML, which is not filtered again
    assert not list(environment().parse(source).find_all((jinja2.nodes.EvalContextModifier, jinja2.nodes.Filter, *joins)))


def test_a_value_that_a_template_was_not_given_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'policy' is undefined"):
        environment().get_template("page.html.j2").render()


@pytest.mark.parametrize("text", ["a</script>", "<!-- a"])
def test_what_could_end_a_script_is_not_left_unescaped(text):
    with pytest.raises(ValueError, match="holds"):
        unescaped(text)


def test_characters_that_hide_or_reorder_are_made_visible():
    assert shown("a\u202eb\u200bc\x00") == "a\\u{202e}b\\u{200b}c\\u{0}"
    assert shown("\u00fcber \u6f22\u5b57 \u05d0") == "\u00fcber \u6f22\u5b57 \u05d0"


def test_an_endless_name_is_shortened_in_its_middle():
    assert len(shown("x" * 100_000)) < 700


def test_the_data_are_json_that_no_name_can_end():
    page = render(made.hostile_facts("</script><b>"))
    data = page.split('id="timeline-data">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["names"] == ["</script><b>"]


def test_a_timeline_says_which_side_is_missing():
    lanes = made.timeline().lanes
    only = [
        replace(made.facts(), timeline=replace(made.timeline(), lanes=[x for x in lanes if x.measured is side]))
        for side in (True, False)
    ]
    only[1] = replace(only[1], timeline=replace(only[1].timeline, step=None))
    assert "as measured" in Outline(render(only[0])).text
    assert "as predicted" in Outline(render(only[1])).text
    assert "nothing to draw" in Outline(render(replace(made.facts(), timeline=replace(made.timeline(), lanes=())))).text


def test_a_plan_that_trains_something_else_is_no_gain():
    plan, losses = Plan.of(fusion_threshold_bytes=1), made.losses("different", "first 20 losses differ, by more than 0.0001")
    refused = RefusedPlan(plan=plan, predicted_us=80e3, measured_us=50e3, losses=losses)
    ran = structs.replace(made.validation(1.3, beyond_noise=True), plans=(), refused=(refused,))
    text = Outline(render(searched(validation=ran))).text
    assert "The measured plans train something else" in text
    assert "differ, by more than" in text
    assert "none: trains something else" in text
    assert "faster than recorded" not in text
    beside = structs.replace(made.validation(1.3, beyond_noise=True), refused=(refused,))
    text = Outline(render(searched(validation=beside))).text
    assert "1.30\u00d7 faster than recorded" in text
    assert "1 other plan trained something else" in text


def test_a_plan_that_failed_in_a_run_is_no_gain():
    reason = "the job took longer than 300 s (--timeout) and was ended"
    ran = made.validation(1.3, beyond_noise=True)
    for runs, measured_us in ((1, 50e3), (0, None)):
        plan = Plan.of(fusion_threshold_bytes=1)
        failed = FailedPlan(plan=plan, predicted_us=80e3, reason=reason, runs=runs, measured_us=measured_us)
        text = Outline(render(searched(validation=structs.replace(ran, plans=(), failed=(failed,))))).text
        assert "The plans' runs failed" in text
        assert reason in text
        assert "none: a run failed" in text
        assert "faster than recorded" not in text
    other = structs.replace(failed, plan=Plan.of(fusion_threshold_bytes=2))
    text = Outline(render(searched(validation=structs.replace(ran, failed=(other,))))).text
    assert "1.30\u00d7 faster than recorded" in text
    assert "1 other plan failed in a run" in text


def test_where_nothing_keeps_the_memory_limit_that_is_said():
    nearest = structs.replace(made.plan(0, 80e3, certain=False), infeasible="needs 900 MiB, and may have 100")
    search = structs.replace(made.search(nearest), feasible=False)
    baseline = made.baseline("needs 1200 MiB, and may have 100")
    trials = [trial | {"infeasible": "needs 900 MiB, and may have 100"} for trial in made.trials()]
    text = Outline(render(replace(made.facts(), search=search, baseline=baseline, trials=trials))).text
    assert "No plan stays within the memory limit" in text
    assert "needs too much memory" in text


@given(st.lists(st.floats(0, 1e15), min_size=5, max_size=5))
def test_any_numbers_make_a_page(numbers):
    iteration, low, high, memory, start = numbers
    row = structs.replace(made.plan(0, 80e3), predicted_iteration_us=iteration, interval_us=(low, high), peak_memory_bytes=memory)
    trials = [
        trial | {"iteration_us": value, "peak_memory_bytes": memory + place}
        for place, (trial, value) in enumerate(zip(made.trials(), numbers, strict=False))
    ]
    lane = Lane(rank=0, measured=True, name="stream")
    lane.add("gemm", "compute", start, iteration)
    facts = replace(made.facts(), search=made.search(row), trials=trials, timeline=StepTimeline(lanes=(lane,), step=0))
    assert render(facts).endswith("</html>\n")


def test_the_headline_of_a_recording_is_its_finding_and_what_it_would_gain():
    finding = (
        "Host-bound: devices are idle for 75 % of an iteration because nothing was launched; use CUDA graphs (--what-if launch=0)."
    )
    gain = PredictedGain(what_if="launch=0", predicted_iteration_us=20e3, gain_us=80e3)
    outline = Outline(render(diagnosed(findings=(finding, "Look at the input."), gains=(gain,))))
    assert "Host-bound: devices are idle for 75 % of an iteration; up to 5\u00d7 faster" in outline.texts
    assert outline.text.count(finding) == 1, "the breakdown lists the other findings"
    assert "Look at the input." in outline.text
    assert "with an error of" not in outline.text


def test_a_gain_of_another_question_is_not_put_behind_a_finding():
    gain = PredictedGain(what_if="communication=0", predicted_iteration_us=20e3, gain_us=80e3)
    page = render(diagnosed(findings=("Server 1 has 91 % of the bytes, 50 % would be even.",), gains=(gain,)))
    headline = Outline(page).text.split("Where a step goes")[1]
    assert "Server 1 has 91 % of the bytes " in headline
    assert "up to" not in headline


def test_a_recording_without_a_finding_has_its_time_as_headline():
    assert "A step takes 98.0 ms; nothing that stands out slows it" in Outline(render(diagnosed(findings=()))).text


def test_a_sample_shows_real_runs_of_plans_that_the_search_did_not_list():
    facts = replace(made.facts(), sample_runs=made.validation(1.3, beyond_noise=True))
    text = Outline(render(facts)).text
    assert "Best plan on real runs" in text
    assert "1.30\u00d7" in text
    assert "Confirmed by real runs" not in text


def test_unknown_time_is_shown_as_unknown_in_its_own_colour():
    lane = Lane(rank=0, measured=False, name="stream 7")
    lane.add("gemm", "compute", 0.0, 60e3)
    lane.add("what nothing explains", "unknown", 60e3, 40e3)
    with_parts = RankFacts(rank=0, host="a", breakdown_us={"compute": 60e3, "unknown": 40e3}, last_pct=None, waited_us=None)
    for row in (with_parts, RankFacts(rank=0, host="a")):
        facts = replace(diagnosed(ranks=(row,)), timeline=StepTimeline(lanes=(lane,), step=None))
        outline = Outline(render(facts))
        parts = {rect["data-tip"]: rect["class"] for rect in outline.named("rect") if "data-tip" in rect}
        assert parts["unknown: 40.0 ms (40.0 %)"].split()[:2] == ["part", "unknown"]
        assert parts["compute: 60.0 ms (60.0 %)"].split()[:2] == ["part", "compute"]
        swatches = [span["class"].split() for span in outline.named("span") if "class" in span]
        assert sum("unknown" in classes for classes in swatches) == 2, "of the bars and of the timeline"
