"""Scales, fronts and shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from report import made

from dpro_search.kinds._diagnosis import RankFacts
from dpro_search.report.charts import ticks
from dpro_search.report.html import to_text
from dpro_search.report.progress import best_so_far, pareto_front, search_section
from dpro_search.report.sections import breakdown_section

_SIZES = st.floats(-1e9, 1e9)


@given(_SIZES, _SIZES)
def test_ticks_are_few_even_and_cover_the_values(first, second):
    low, high = sorted((first, second))
    positions = ticks(low, high)
    assert positions[0] <= low + 1e-9 * abs(low) + 1e-300  # a subnormal number is none
    assert positions[-1] >= high - 1e-9 * abs(high) - 1e-300
    assert 2 <= len(positions) <= 8


def test_best_so_far_only_falls():
    assert [trial["number"] for trial in best_so_far(made.trials())] == [0, 1, 3]


def test_no_trial_is_faster_and_smaller_than_one_on_the_front():
    front = pareto_front(made.trials())
    assert [trial["number"] for trial in front] == [2, 1, 3]
    for trial in made.trials():
        assert not any(
            trial["iteration_us"] < other["iteration_us"] and trial["peak_memory_bytes"] < other["peak_memory_bytes"]
            for other in front
        )


def test_there_is_no_front_where_all_plans_need_the_same_memory():
    same = [trial | {"peak_memory_bytes": 1} for trial in made.trials()]
    assert "Pareto" not in to_text(search_section(same))
    assert "Pareto" in to_text(search_section(made.trials()))


@pytest.mark.parametrize("memory", [None, 1])
def test_one_trial_makes_a_search(memory):
    assert to_text(search_section([made.trials()[0] | {"peak_memory_bytes": memory}]))


def test_a_job_without_a_breakdown_gets_one_from_the_timeline():
    ranks = (RankFacts(rank=0, host="a"), RankFacts(rank=1, host="b"))
    diagnosis = structs.replace(made.facts().diagnosis, ranks=ranks)
    text = to_text(breakdown_section(diagnosis, (), made.timeline(slices=100), ((), ())))
    assert "Added up from the lanes of the timeline" in text
    assert "exposed communication" in text
    assert text.count("rank 1 on b") == 2  # the bar's title and its name


def test_a_long_search_is_thinned_out_but_for_its_best():
    many = [made.trials()[1] | {"number": number, "iteration_us": 100e3 - number % 7} for number in range(20_000)]
    text = to_text(search_section([*many, made.trials()[3] | {"number": 20_000}]))
    assert text.count("<circle") < 10_000
    assert "of the trials, evenly spread" in text
    assert "trial 20000: " in text


def test_a_plan_that_needs_too_much_memory_is_never_the_best():
    trials = [trial | {"infeasible": "needs 50 MiB, and may have 45"} if trial["number"] == 3 else trial for trial in made.trials()]
    assert [trial["number"] for trial in best_so_far(trials)] == [0, 1]
    assert [trial["number"] for trial in pareto_front(trials)] == [2, 1]
