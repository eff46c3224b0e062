"""Sentences about a critical path, whatever kind of job it is of."""

from types import SimpleNamespace

from dpro_search.replay.path.findings import best_gain, path_findings
from dpro_search.replay.path.segments import PathSegment


def segment(kind, duration_us, *, rank=-1, name=""):
    return PathSegment(kind=kind, rank=rank, name=name, start_us=0.0, duration_us=duration_us, share_pct=0.0)


PATH = (
    segment("compute", 500.0, rank=0),
    segment("late_rank", 200.0, rank=1, name="sum 0"),
    segment("negotiation", 50.0, name="sum 0"),
    segment("communication", 150.0, name="sum 0"),
    segment("communication", 100.0, name="sum 1"),
)


def gain(what_if, gain_us):
    return SimpleNamespace(what_if=what_if, gain_us=gain_us)


def test_exposed_communication_names_the_largest_its_parts_and_what_to_do():
    communication, late = path_findings(PATH, [], 1000.0, parts_us={"sums": 250.0}, advice="buy a link")
    assert communication == (
        "Communication that nothing hides takes 300.0 us (30 % of an iteration), sums 250.0 us, negotiation 50.0 us of it, "
        "sum 0 most (150.0 us): buy a link."
    )
    assert late.startswith("All ranks wait 200.0 us (20 % of an iteration) for rank 1")


def test_the_costliest_comes_first_and_what_is_small_is_left_out():
    gains = [gain("bandwidth=2", 400.0), gain("compute=0.9", 29.0)]
    sentences = path_findings(PATH, gains, 1000.0)
    assert sentences[0].startswith("A link twice as fast would gain 400.0 us")
    assert not any("a tenth less" in sentence for sentence in sentences)


def test_a_kind_adds_sentences_of_its_own():
    sentences = path_findings(
        (), [gain("knob=1", 100.0)], 1000.0, sentences={"knob=1": "Turning it would gain {}."}, more=[(50.0, "And so.")]
    )
    assert sentences == ("Turning it would gain 100.0 us (10 % of an iteration).", "And so.")


def test_advice_is_the_best_of_a_kinds_own_questions():
    gains = [gain("compute=0.9", 90.0), gain("cap=1", 10.0), gain("cap=5", 20.0)]
    assert best_gain(gains, ("cap",), 1000.0, "nothing") == "'cap=5' would gain 20.0 us (2 % of an iteration)"
    assert best_gain([gain("cap=1", -3.0)], ("cap",), 1000.0, "nothing") == "nothing"


def test_a_path_without_communication_says_nothing_about_it():
    assert path_findings(PATH[:1], [], 1000.0) == ()
