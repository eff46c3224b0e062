"""What a terminal gets: completions, colours that can be turned off, quiet, tables that fit."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import NoReturn

import pytest

from dpro_search.cli import VERBS, main
from tests.every_case import every_case
from tests.in_process import dpro


def completed(words: str) -> list[str]:
    """What bash would offer for a command line, "dpro-search re"."""
    typed = words.split(" ")
    done = dpro(COMP_WORDS=words, COMP_CWORD=str(len(typed) - 1), _DPRO_SEARCH_COMPLETE="complete_bash")
    assert done.stderr == ""
    return done.stdout.split()


def test_verbs_are_completed():
    assert completed("dpro-search re") == ["replay", "report"]
    assert set(completed("dpro-search ")) >= set(VERBS)


def test_options_and_their_values_are_completed():
    assert completed("dpro-search collect --fr") == ["--framework"]
    assert completed("dpro-search collect --framework py") == ["pytorch"]


def test_zsh_and_fish_are_served_too():
    for shell, action in (("zsh", {}), ("fish", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"})):
        done = dpro(_TYPER_COMPLETE_ARGS="dpro-search run --samp", _DPRO_SEARCH_COMPLETE=f"complete_{shell}", **action)
        assert "--sampler" in done.stdout


def test_a_completion_loads_nothing_heavy():
    code = (
        "import sys\nfrom dpro_search.cli import main\n"
        "try: main([])\nexcept SystemExit: print('numpy' in sys.modules, file=sys.stderr)"
    )
    env = {**os.environ, "COMP_WORDS": "dpro-search run --tri", "COMP_CWORD": "2", "_DPRO_SEARCH_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.stdout.split(), done.stderr.split()) == (["--trials"], ["False"])


def test_the_script_for_the_shell_can_be_had():
    done = dpro(_DPRO_SEARCH_COMPLETE="source_bash")
    assert done.returncode == 0, done.stderr
    assert "_DPRO_SEARCH_COMPLETE=complete_bash" in done.stdout


def on_a_terminal(*args: object, **env: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    child, ours = pty.fork()  # a copy of this process, with its imports
    if not child:
        _become(args, env)
    written = bytearray()
    try:
        while piece := os.read(ours, 1 << 16):
            written += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, written
    return written.decode()


def _become(args: tuple[object, ...], env: dict[str, str]) -> NoReturn:
    """The command, on the terminal that is this process's standard input and output."""
    code = 1
    try:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            os.environ.pop(name, None)
        os.environ.update(env)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        main([*map(str, args)])
    except SystemExit as ended:
        code = int(ended.code or 0)
        sys.stdout.flush()
    finally:
        os._exit(code)


COLOUR = re.compile(r"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])\b[0-9;]*m")


def test_colours_are_for_terminals_and_no_color_takes_them_away(tmp_path: Path):
    search = ("run", "--sampler", "mcmc", "--trials", 5)
    env = {"TERM": "xterm-256color"}
    coloured = on_a_terminal(*search, "--out", tmp_path / "a", **env)
    plain = on_a_terminal(*search, "--out", tmp_path / "b", NO_COLOR="1", **env)
    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)
    assert "trials in" in plain


def test_quiet_leaves_the_result_and_errors_only(tmp_path: Path):
    source = Path(__file__).parents[1] / "data" / "ddp_mlp"
    done = dpro("import", source, "--out", tmp_path / "T", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert str(tmp_path / "T") in done.stdout
    again = dpro("import", source, "--out", tmp_path / "T", "--quiet")
    assert again.returncode == 2
    assert "exists already" in again.stderr


@every_case("verb", VERBS)
def test_every_verb_can_be_quiet_and_its_help_fits_80_columns(verb):
    done = dpro(verb, "--help", COLUMNS="80")
    assert "--quiet" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("args", [("replay",), ("replay", "--samples", "5"), ("diagnose",)])
def test_results_fit_80_columns(args):
    done = dpro(*args)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(
    "args", [("diagnose",), ("doctor",), ("replay", "--samples", "5"), ("run", "--trials", 30, "--out"), ("report", "--out")]
)
def test_a_terminal_of_80_columns_is_wide_enough(args, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = on_a_terminal(*args, *(["x"] if args[-1] == "--out" else []), TERM="xterm-256color", DPRO_SEARCH_ENVS="/nonexistent")
    lines = re.split(r"[\r\n]+", STEERING.sub("", shown))
    assert max(map(len, lines)) <= 80


def test_json_is_the_same_with_and_without_a_terminal():
    shown = on_a_terminal("replay", "--json", TERM="xterm-256color")
    assert json.loads(shown)["predicted_iteration_us"] == json.loads(dpro("replay", "--json").stdout)["predicted_iteration_us"]
