"""The verb `report`, as a process: on the bundled sample and on a search of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.in_process import dpro
from tests.sample import horovod_trace_path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("searched") / "run"
    done = dpro("run", "--trials", 12, "--quiet", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def page_of(*args: object, out: Path) -> str:
    done = dpro("report", *args, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"report": str(out)}
    return out.read_text("utf-8")


def test_a_report_of_a_recording(tmp_path):
    page = page_of(horovod_trace_path(), out=tmp_path / "page.html")
    data = json.loads(page.split('id="timeline-data">')[1].split("</script>")[0])
    assert {lane["measured"] for lane in data["lanes"]} == {True, False}
    assert {lane["rank"] for lane in data["lanes"]} == {0, 1}
    for title in ("Where a step goes", "Critical path", "Sizes of ", "How far to trust the predictions", "Terms of the cost model"):
        assert title in page
    assert "each predicted from all other steps" in page


def test_a_report_of_a_search_says_how_it_was_made(run, tmp_path):
    page = page_of(run, out=tmp_path / "page.html")
    assert "12 trials by" in page
    assert "seed 0" in page
    assert "SHA-256" in page
    assert "Best plans" in page


def test_an_older_page_is_replaced(tmp_path):
    out = tmp_path / "page.html"
    out.write_text("old")
    assert page_of(out=out).startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("validation.json", "{", "not a validation"),
        ("result.json", "[]", "not a search result"),
        ("run.json", "{}", "damaged"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(run, tmp_path, file, content, message):
    copy = tmp_path / "run"
    copy.mkdir()
    for path in run.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    (copy / file).write_text(content)
    done = dpro("report", copy, "--out", tmp_path / "page.html")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert file in line
    assert message in line
    assert not (tmp_path / "page.html").exists()


def test_an_incomplete_journal_is_reported(run, tmp_path):
    copy = tmp_path / "run"
    copy.mkdir()
    for path in run.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    journal = copy / "trials.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    done = dpro("report", copy, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "line 12 is damaged" in " ".join(done.stderr.split())


def test_a_folder_that_is_neither_is_wrong_usage(tmp_path):
    done = dpro("report", tmp_path, "--out", tmp_path / "page.html")
    assert done.returncode == 2
    assert "neither a run folder" in done.stderr


def test_another_trace_than_the_searched_one_is_refused(run, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in horovod_trace_path().iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    meta = other / "meta.json"
    meta.write_text(meta.read_text() + "\n")
    done = dpro("report", run, "--trace", other, "--out", tmp_path / "page.html")
    assert done.returncode == 2
    assert "not the trace of this search" in done.stderr


def test_a_report_of_the_sample_knows_its_real_runs(tmp_path):
    assert "Best plan on real runs" in page_of(out=tmp_path / "page.html")
