"""What `collect` and `validate` show of a running job."""

import io

import pytest
from rich.console import Console

from dpro_search.cli import main
from dpro_search.cli.printing.progress import JobProgress
from dpro_search.collect.launch.while_running import JobState


def shown(*states: JobState, terminal: bool = False, **begun: object) -> str:
    output = io.StringIO()
    with JobProgress(Console(file=output, force_terminal=terminal, width=200)) as progress:
        progress.begin("recording 2 ranks", **begun)
        for state in states:
            progress.show(state)
    return output.getvalue()


def state(elapsed_s: float, steps: int | None = 10, line: str = "loss 3.0") -> JobState:
    return JobState(elapsed_s=elapsed_s, steps=steps, last_line=line)


def test_a_file_gets_a_line_at_the_start_and_every_half_minute():
    lines = shown(*map(state, (1, 10, 31, 40, 62)), steps=40).splitlines()
    assert lines == [
        "recording 2 ranks",
        "31 s: recording 2 ranks, step 10 (40 needed), about 93 s left | loss 3.0",
        "62 s: recording 2 ranks, step 10 (40 needed), about 3 min left | loss 3.0",
    ]


def test_a_terminal_gets_one_live_line():
    assert " recording 2 ranks, step 20 (40 needed), about 5 s left | loss 3.0" in shown(
        state(5, steps=20), terminal=True, steps=40
    )


@pytest.mark.parametrize(
    ("state", "begun", "line"),
    [
        (state(31, steps=None, line=""), {}, "recording 2 ranks"),
        (state(31, steps=50), {"steps": 40}, "recording 2 ranks, step 50 (40 needed) | loss 3.0"),
        (state(31, steps=None, line="\x1b[2Jx"), {"left_s": 331.0}, "recording 2 ranks, about 5 min left | \\u{1b}[2Jx"),
    ],
)
def test_what_is_not_known_is_left_out(state, begun, line):
    assert shown(state, **begun).splitlines()[-1] == f"31 s: {line}"


@pytest.mark.parametrize(("keep", "kept"), [((), "nothing is kept"), (("--keep-raw", "raw"), "raw keeps the raw files so far")])
def test_an_interrupted_recording_says_what_is_kept(keep, kept, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("dpro_search.collect.launchers.Launcher.record", interrupted)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main(["collect", "--out", "T", *keep, "--", "python", "train.py"])
    assert f"error: interrupted: the job was ended and T was not written; {kept}" in capsys.readouterr().err


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
