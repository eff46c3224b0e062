"""Closed streams, FIFOs, devices, links and byte-order marks: an answer or one line of error, and never a process that waits."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpro_search.cli import main
from tests.every_case import every_case
from tests.faults import processes
from tests.faults.processes import command
from tests.in_process import dpro, fails_in_one_line, succeeds
from tests.sample import horovod_trace_path

JOB = ("describe", "gpt2-xl", "--cluster", "2xhgx-h100", "--global-batch", 64, "--seq-len", 1024)
WAIT_S = 120


class TestClosedStreams:
    @pytest.mark.parametrize("closed", ["1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
    def test_a_verb_works_without_them(self, closed):
        words = ["sh", "-c", f'"$@" {closed}', "sh", *command("samples", "--json")]
        done = subprocess.run(words, capture_output=True, timeout=WAIT_S, check=True)
        assert (done.stdout, done.stderr) == (b"", b"")

    def test_a_reader_that_ends_early_meets_no_traceback(self):
        with subprocess.Popen(command("samples"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("searched") / "run"
    succeeds("run", "--trials", 5, "--sampler", "mcmc", "--out", folder)
    return folder


@contextlib.contextmanager
def ended_if_it_waits() -> Iterator[None]:
    """A command that waits for a writer, who never comes, fails the test."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"it still waits after {WAIT_S} s"))
    signal.alarm(WAIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class TestOnlyRegularFilesAreOpened:
    @pytest.mark.parametrize("name", ["run.json", "result.json", "trials.jsonl", "validation.json"])
    def test_a_fifo_in_a_run_folder(self, name, searched, tmp_path):
        run = shutil.copytree(searched, tmp_path / "run")
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
        with ended_if_it_waits():
            done = dpro("report", run, "--out", tmp_path / "page.html")
        assert done.returncode in (0, 2), done.stderr

    @pytest.mark.parametrize(
        "words",
        [
            ("replay", "--cluster", "FIFO.toml"),
            ("replay", "--machine", "FIFO"),
            ("replay", "FIFO"),
            ("report", "FIFO"),
            ("fit", "FIFO", "--out", "model"),
            ("export", "FIFO", "--out", "tuned"),
        ],
    )
    def test_a_fifo_as_an_input(self, words, tmp_path):
        fifo = tmp_path / ("f.toml" if "FIFO.toml" in words else "fifo")
        os.mkfifo(fifo)
        with ended_if_it_waits():
            line = fails_in_one_line(2, *(fifo if "FIFO" in word else word for word in words), cwd=tmp_path)
        assert str(fifo) in line

    def test_a_device_that_never_ends(self, tmp_path):
        (tmp_path / "cluster.toml").symlink_to("/dev/zero")
        line = processes.fails_in_one_line(2, "replay", "--cluster", tmp_path / "cluster.toml")
        assert "a device, not a regular file" in line


class TestLinks:
    @every_case("name", ["run.json", "result.json", "plans", "plans/plan-1.json"])
    @every_case("verb", [("report", "RUN", "--out", "page.html"), ("export", "RUN", "--out", "tuned")])
    def test_a_link_in_a_run_folder_is_not_read(self, verb, name, searched, tmp_path):
        run = shutil.copytree(searched, tmp_path / "run")
        outside = (run / name).rename(tmp_path / "outside")
        (run / name).symlink_to(outside)
        done = dpro(*(run if word == "RUN" else word for word in verb), cwd=tmp_path)
        assert done.returncode == 2
        assert f"{run / name}: a link, and links in a run folder are not followed" in done.stderr

    def test_a_base_that_is_a_loop(self, tmp_path):
        (tmp_path / "loop.toml").symlink_to("loop.toml")
        (tmp_path / "cluster.toml").write_text('base = "loop.toml"\n')
        done = dpro("replay", "--cluster", tmp_path / "cluster.toml")
        assert done.returncode == 2
        assert "loop.toml: cannot be read" in done.stderr

    @every_case(
        "words",
        [
            ("replay", "LOOP"),
            ("report", "LOOP"),
            ("run", "LOOP"),
            ("export", "LOOP", "--out", "x"),
            ("export", "plan.json", "--out", "LOOP"),
            ("import", "LOOP", "--out", "x"),
            ("fit", "LOOP", "--out", "x"),
        ],
    )
    def test_a_loop_is_one_line(self, words, tmp_path):
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "plan.json").write_text('{"version": 2}')
        done = dpro(*(tmp_path / "loop" if word == "LOOP" else word for word in words), cwd=tmp_path)
        assert done.returncode in (1, 2)
        assert len(done.stderr.splitlines()) == 1


class TestByteOrderMarks:
    """Some editors write one before UTF-8 text."""

    def marked(self, path: Path, text: bytes) -> Path:
        path.write_bytes(b"\xef\xbb\xbf" + text)
        return path

    def test_a_description(self, tmp_path):
        job = succeeds(*JOB).encode()
        (tmp_path / "plain.toml").write_bytes(job)
        plain, marked = (
            json.loads(succeeds("replay", path, "--json"))["predicted_iteration_us"]
            for path in (tmp_path / "plain.toml", self.marked(tmp_path / "job.toml", job))
        )
        assert marked == plain

    def test_a_plan(self, tmp_path):
        succeeds("export", self.marked(tmp_path / "plan.json", b'{"version": 2}'), "--out", tmp_path / "tuned")

    def test_a_profile(self, tmp_path):
        text = b'{"schemaVersion": 1, "traceEvents": []}'
        (tmp_path / "plain.json").write_bytes(text)
        plain = dpro("import", tmp_path / "plain.json", "--out", tmp_path / "t").stderr
        assert dpro("import", self.marked(tmp_path / "p.json", text), "--out", tmp_path / "t").stderr == plain.replace("plain", "p")

    def test_metadata_of_a_trace(self, tmp_path):
        trace = shutil.copytree(horovod_trace_path(), tmp_path / "trace")
        self.marked(trace / "meta.json", (trace / "meta.json").read_bytes())
        succeeds("replay", trace, "--json")


class TestErrors:
    def test_a_long_line_is_cut_in_its_middle(self, tmp_path):
        done = dpro("export", tmp_path / "no.json", "--out", "x" * 100_000)
        assert len(done.stderr) < 1700

    def test_an_internal_error_is_one_line(self, monkeypatch, capsys):
        def fail(verb):
            raise ZeroDivisionError("by nothing\nat all")

        monkeypatch.setattr("dpro_search.cli._command_of", fail)
        with pytest.raises(SystemExit) as ended:
            main(["doctor"])
        line = capsys.readouterr().err
        assert ended.value.code == 1
        assert line.startswith("dpro-search: error: internal error in dpro_search/cli/__init__.py, line ")
        assert line.endswith(
            "(ZeroDivisionError: by nothing at all); please report it with the command and its input; --debug shows the traceback\n"
        )

    @pytest.mark.parametrize(("words", "env"), [(["doctor", "--debug"], "0"), (["doctor"], "1")])
    def test_its_traceback_is_shown_on_request(self, words, env, monkeypatch):
        def fail(verb):
            raise ZeroDivisionError

        monkeypatch.setenv("DPRO_SEARCH_DEBUG", env)
        monkeypatch.setattr("dpro_search.cli._command_of", fail)
        with pytest.raises(ZeroDivisionError):
            main(words)
