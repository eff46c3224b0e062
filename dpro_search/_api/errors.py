"""Errors of the Python API name its parameters and methods, where the same errors on the command line name options and verbs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from dpro_search.errors import DproSearchError, InputError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
_PARAMETERS = {"set": "changes", "with": "with_", "timeout": "timeout_s", "memory-limit": "memory_limit_bytes"}
_VERB = re.compile(r"'dpro-search (run|validate|export|import)\b[^']*'")
_METHODS = {"run": "Recording.search", "validate": "Run.validate", "export": "Run.export", "import": "dpro_search.import_trace"}


def speaks_python(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, whose errors of the package speak of parameters."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except DproSearchError as error:
            error.args = (in_python(str(error)),)
            raise

    return call


def page_path(out: str | Path) -> Path:
    """The file that a report is written to; raises `InputError` for a folder."""
    if Path(out).is_dir():
        raise InputError(f"out {str(out)!r}: is a folder; name a file, like {str(Path(out) / 'report.html')!r}")
    return Path(out)


def in_python(message: str) -> str:
    """A message of the command line in the words of the Python API.

    >>> in_python("--holdout-step 99: leave out --set; make it with 'dpro-search validate'")
    "holdout_step 99: leave out changes; make it with 'Run.validate'"
    """
    named = _OPTION.sub(lambda match: _PARAMETERS.get(match[1], match[1].replace("-", "_")), message)
    return _VERB.sub(lambda match: f"'{_METHODS[match[1]]}'", named)
