"""Verbs of the command line, called in this process."""

from __future__ import annotations

import json
from typing import Any

from tests.in_process import dpro, succeeds


def outcome(*args: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    done = dpro(*args)
    return done.returncode, done.stdout, done.stderr


def printed(*args: object) -> str:
    """What a verb prints on stdout."""
    return succeeds(*args)


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
