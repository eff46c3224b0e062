"""The command `dpro-search`: finds the verb, runs it, and turns what goes wrong into one line and an exit code.

A verb is a module here with one function of its name. Only the module of the verb that was asked for is imported, so that
`--help` answers at once.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer

from dpro_search import __version__
from dpro_search.errors import DproSearchError


@dataclass(frozen=True)
class _Verb:
    module: str
    help: str


_VERBS = {
    "collect": _Verb("dpro_search.cli.collect", "Run a training job with the hooks on and write a trace."),
    "import": _Verb("dpro_search.cli.import_", "Turn the raw files of a recorded job into a trace."),
    "replay": _Verb("dpro_search.cli.replay", "Predict the iteration time of a trace, as recorded or changed."),
    "diagnose": _Verb("dpro_search.cli.diagnose", "Show what an iteration waits for and what improvements would gain."),
    "fit": _Verb("dpro_search.cli.fit", "Train cost models, or measure what they are trained on."),
    "run": _Verb("dpro_search.cli.run", "Search the best plans for a trace."),
    "export": _Verb("dpro_search.cli.export", "Write the files with which a real job follows a plan."),
    "validate": _Verb("dpro_search.cli.validate", "Run the best plans for real and compare with the predictions."),
    "report": _Verb("dpro_search.cli.report", "Write one HTML page on a search or a recording."),
    "doctor": _Verb("dpro_search.cli.doctor", "Show what this machine and a trace support, and how to get the rest."),
}

# The base of all usage errors. Typer exports only this child of it, and has its own copy of click in some versions.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _InterruptedError(Exception):
    """Ctrl-C, in a form that the command-line library does not turn into an exit code of its own."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (default: of this process) and exit.

    Exit codes: 0 success; 1 the job itself failed, or this machine could not do it, or Ctrl-C; 2 wrong usage or bad input.
    """
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    verb = next((arg for arg in args if not arg.startswith("-")), "")
    try:
        code = typer.main.get_command(_app(verb))(args, prog_name="dpro-search", standalone_mode=False)
        sys.stdout.flush()
    except DproSearchError as error:
        _fail(str(error), error.exit_code)
    except _ClickError as error:
        _fail(f"{error.format_message().rstrip('.')}; see '{_help_of(verb)}'", 2)
    except (_InterruptedError, KeyboardInterrupt, typer.Abort) as error:
        _fail(str(error) or "interrupted", 1)
    except BrokenPipeError:
        _close_quietly()
    except OSError as error:
        _fail(_os_error(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _app(verb: str) -> typer.Typer:
    """All verbs for `--help`; the asked one with its options."""
    app = typer.Typer(add_completion=False, help="Record a distributed training job, replay it, search plans, prove the best.")
    app.callback()(_options)
    for name, entry in _VERBS.items():
        app.command(name, help=None if name == verb else entry.help)(_loaded(entry) if name == verb else _listed)
    return app


def _loaded(verb: _Verb) -> Callable[..., Any]:
    function = getattr(importlib.import_module(verb.module), verb.module.rpartition(".")[2])

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise _InterruptedError(*interrupt.args) from interrupt

    return run


def _listed() -> None:
    raise AssertionError("a verb that was not asked for")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dpro-search {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _help_of(verb: str) -> str:
    return f"dpro-search {verb} --help" if verb in _VERBS else "dpro-search --help"


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        reason += "; free some space and run the command again"
    return f"{error.filename}: {reason}" if error.filename else reason


def _fail(message: str, code: int) -> NoReturn:
    print(f"dpro-search: error: {' '.join(message.split())}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _close_quietly()
    sys.exit(code)


def _close_quietly() -> NoReturn:
    """The reader of our output is gone or its disk is full: what is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
