"""Verbs of the command line, called in this process."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from dpro_search.cli import main


def outcome(*args: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), pytest.raises(SystemExit) as ended:
        main([*map(str, args)])
    return int(ended.value.code or 0), out.getvalue(), error.getvalue()


def printed(*args: object) -> str:
    """What a verb prints on stdout."""
    status, out, error = outcome(*args)
    assert status == 0, out + error
    return out


def verb(*args: object) -> dict[str, Any]:
    """The JSON of a verb."""
    return dict(json.loads(printed(*args[:1], "--json", *args[1:])))


def refusal(*args: object) -> str:
    """The one line with which a verb refuses what it is given."""
    status, _, error = outcome(*args)
    assert status == 2, error
    lines = [line for line in error.splitlines() if line]
    assert len(lines) == 1, error
    return lines[0]
