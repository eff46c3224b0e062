"""Questions from public threads: what the files hold, and that each question gets an answer or a reason."""

from __future__ import annotations

from collections import Counter

import pytest

from dpro_search.analysis.expect.causes import CAUSES, cause_texts
from experiments.questions.answers import answered, summary
from experiments.questions.names import known_as, table, threads_by_cause
from experiments.questions.page import page

QUESTIONS = {question["id"]: question for question in table("questions.toml")["question"]}
FAST = ("horovod-476", "hf-bert-large-v100-memory", "alpaca-73", "tinyllama-2x4090", "google-bert-255", "torchprime-llama3-8b")


def test_there_are_fifty_questions_of_every_kind_with_a_link_and_the_words_that_prove_the_outcome():
    assert len(QUESTIONS) >= 50
    kinds = Counter(question["kind"] for question in QUESTIONS.values())
    assert set(kinds) == {"time", "memory", "fits", "cause", "ranking"}
    assert min(kinds.values()) >= 5
    for question in QUESTIONS.values():
        assert question["link"].startswith("https://")
        assert question["outcome"]["quote"]


def test_priors_are_counted_from_threads_that_judge_nothing():
    counts = threads_by_cause()
    assert {name: text.threads for name, text in cause_texts().items()} == {name: counts[name] for name in (*CAUSES, "none")}
    judging = {question["link"] for question in QUESTIONS.values() if question["kind"] == "cause"}
    assert not judging & {thread["link"] for thread in table("causes.toml")["thread"]}


@pytest.fixture(scope="module")
def answers():
    return [answered(QUESTIONS[name]) for name in FAST]


def test_answers_stand_beside_what_came_out(answers):
    by_name = {answer.question["id"]: answer for answer in answers}
    assert by_name["horovod-476"].rank == 1
    assert by_name["hf-bert-large-v100-memory"].agrees
    assert by_name["alpaca-73"].said.startswith("it needs")
    assert "Kendall tau" in by_name["tinyllama-2x4090"].said
    assert abs(by_name["google-bert-255"].error) < 0.5
    assert by_name["torchprime-llama3-8b"].agrees is None, "a described job has no cost model for TPUs"


def test_the_page_has_a_row_for_each_question_and_the_figures(answers):
    text = page(answers)
    assert all(text.count(f"[{name}](") == 1 for name in FAST)
    assert f"| questions | {len(FAST)} |" in text
    assert summary(answers)["refused"] == 1


def test_other_names_of_causes_are_known():
    assert known_as("wrong-peak-flops") == known_as("padding") == "counted-otherwise"
    assert known_as("tcp-instead-of-rdma") == "tcp-instead-of-rdma"
