"""The command `dpro-search`: finds the verb, runs it, and converts an error into one line and an exit code.

A verb is a module here with one function of its name. Only the module of the requested verb is imported, so that `--help` and shell
completion are fast.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import inspect
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer

from dpro_search._text import shortened, visible
from dpro_search._version import __version__
from dpro_search.errors import DproSearchError


@dataclass(frozen=True)
class Verb:
    """A verb: its module, which has a function of the same name, and a line of help."""

    module: str
    help: str
    runs_command: bool = False  # the words behind "--"


VERBS = {
    "collect": Verb("dpro_search.cli.collect", "Run a training job with recording hooks and write a trace.", runs_command=True),
    "import": Verb("dpro_search.cli.import_", "Convert the raw files of a recorded job to a trace."),
    "replay": Verb("dpro_search.cli.replay", "Predict the iteration time of a trace, as recorded or changed."),
    "diagnose": Verb("dpro_search.cli.diagnose", "Show what an iteration waits for and what improvements would gain."),
    "expect": Verb("dpro_search.cli.expect", "Say whether a measured job is as expected, and why it may not be."),
    "ranks": Verb("dpro_search.cli.ranks", "Name the rank, host or link that makes the others of a running job wait."),
    "diff": Verb("dpro_search.cli.diff", "Show what explains the change between two recordings of a job."),
    "describe": Verb("dpro_search.cli.describe", "Write the description of a parallel job that was not recorded."),
    "capture": Verb("dpro_search.cli.capture", "Capture the training step of a PyTorch model without running it."),
    "fit": Verb("dpro_search.cli.fit", "Train cost models, or measure their training data."),
    "run": Verb("dpro_search.cli.run", "Search the fastest plans for a trace."),
    "export": Verb("dpro_search.cli.export", "Write the files that a real job needs to follow a plan."),
    "validate": Verb("dpro_search.cli.real_runs.validate", "Run the best plans for real and compare with the predictions.", True),
    "measured": Verb("dpro_search.cli.real_runs.measured", "Store real times of a plan that ran elsewhere, and name the next run."),
    "report": Verb("dpro_search.cli.report", "Write one HTML page on a search or a recording."),
    "samples": Verb("dpro_search.cli.samples", "List the bundled traces."),
    "doctor": Verb("dpro_search.cli.doctor", "Show what this machine and a trace support, and how to install what is missing."),
}
_PROGRAM = "dpro-search"
_DEBUG, _DEBUG_FLAG = "DPRO_SEARCH_DEBUG", "--debug"
_MOST_ERROR = 1600  # characters of an error: 20 lines of 80, which a terminal shows at once
_COMPLETE = "_DPRO_SEARCH_COMPLETE"  # set by a shell for completion; the words typed so far are in the other two variables
_TYPED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")

# The base of all usage errors. Typer exports only this child of it, and has its own copy of click in some versions.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _InterruptedError(Exception):
    """Ctrl-C, in a form that the command-line library does not convert to its own exit code."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (default: of this process) and exit.

    Exit codes: 0 success; 1 the job failed, this machine lacks something, or Ctrl-C; 2 wrong usage or bad input.
    """
    _open_standard_streams()
    args, debug = _without_debug(sys.argv[1:] if args is None else args)
    if not debug:  # warnings of numpy are for developers; verbs refuse results that are not finite
        warnings.simplefilter("ignore", RuntimeWarning)
    verb = _verb_of(_typed(os.environ) if _COMPLETE in os.environ else args)
    try:
        code = _command_of(verb)(args, prog_name=_PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except DproSearchError as error:
        _fail(str(error), error.exit_code)
    except _ClickError as error:
        _fail(f"{error.format_message().rstrip('.')}; {_dashes(verb, args)}see '{_help_of(verb)}'", 2)
    except (_InterruptedError, KeyboardInterrupt, typer.Abort) as error:
        _fail(str(error) or "interrupted", 1)
    except BrokenPipeError:
        _close_quietly()
    except OSError as error:
        _fail(_os_error(error), 1)
    except MemoryError:
        _fail("not enough memory; free some, or give a smaller input", 1)
    except Exception as error:
        if debug:
            raise
        _fail(_internal_error(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Open the null device for streams that the caller has closed: else files that verbs open would take their numbers."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def _without_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    """The words without ``--debug``, which may stand anywhere before ``--``, and whether tracebacks are shown."""
    words = list(args)
    end = words.index("--") if "--" in words else len(words)
    debug = _DEBUG_FLAG in words[:end]
    words = [word for word in words[:end] if word != _DEBUG_FLAG] + words[end:]
    return words or ["--help"], debug or os.environ.get(_DEBUG, "0") not in ("", "0")


def _internal_error(error: Exception) -> str:
    """The line for an error of this program itself: what it is, and the line of the program that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "dpro_search" in frame.filename]
    _, _, place = frames[-1].filename.rpartition("dpro_search") if frames else ("", "", "")
    where = f" in dpro_search{place}, line {frames[-1].lineno}" if frames else ""
    text = shortened(f"{type(error).__name__}: {error}", 300)
    return f"internal error{where} ({text}); please report it with the command and its input; {_DEBUG_FLAG} shows the traceback"


def _command_of(verb: str) -> Any:
    """All verbs as commands of the command-line library; only the requested verb has its options."""
    app = typer.Typer(help="Record a distributed training job, replay it, search plans, validate the best.")
    app.callback()(_options)
    for name, entry in VERBS.items():
        app.command(name, help=None if name == verb else entry.help)(loaded(entry) if name == verb else _listed)
    return typer.main.get_command(app)


def _verb_of(words: Sequence[str]) -> str:
    return next((word for word in words if not word.startswith("-")), "")


def _typed(environment: Mapping[str, str]) -> list[str]:
    """The words after the program's name, of a command line that is being typed."""
    return next((environment[name] for name in _TYPED if name in environment), "").split()[1:]


def loaded(verb: Verb) -> Callable[..., Any]:
    """The verb's function, with an option ``--quiet`` if it has none of its own."""
    function = getattr(importlib.import_module(verb.module), verb.module.rpartition(".")[2])
    signature = inspect.signature(function, eval_str=True)
    takes_quiet = "quiet" in signature.parameters

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        quiet = kwargs["quiet"] if takes_quiet else kwargs.pop("quiet")
        try:
            # `main`, which is outside, prints errors.
            with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
                return function(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise _InterruptedError(*interrupt.args) from interrupt

    if not takes_quiet:
        flag = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Quiet)
        signature = signature.replace(parameters=[*signature.parameters.values(), flag])
        run.__annotations__ = {**function.__annotations__, flag.name: _Quiet}
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


_Quiet = Annotated[bool, typer.Option("--quiet", help="Only the result and errors: no progress, no warnings.")]


def _listed() -> None:
    raise AssertionError("a verb that was not requested")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"{_PROGRAM} {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG_FLAG, help=f"Show the traceback of an internal error, as with {_DEBUG}=1; for every verb.")
    ] = False,
) -> None:
    pass


def _dashes(verb: str, args: Sequence[str]) -> str:
    """Hint for an unknown option that belongs to the training command."""
    command = verb in VERBS and VERBS[verb].runs_command and "--" not in args
    return "the training command and its options follow '--', like '-- python train.py --epochs 3'; " if command else ""


def _help_of(verb: str) -> str:
    return f"{_PROGRAM} {verb} --help" if verb in VERBS else f"{_PROGRAM} --help"


def _os_error(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        reason += "; free some space and run the command again"
    return f"{error.filename}: {reason}" if error.filename else reason


def _fail(message: str, code: int) -> NoReturn:
    print(f"{_PROGRAM}: error: {shortened(visible(' '.join(message.split())), _MOST_ERROR)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _close_quietly()
    sys.exit(code)


def _close_quietly() -> NoReturn:
    """The reader of our output has ended or its disk is full: buffered output must not raise again at exit."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream of the caller that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
