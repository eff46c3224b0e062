"""Tests of many small cases: one test goes through all of them, and reports every one that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def every_case(
    names: str | Iterable[str], cases: Iterable[Any], ids: Iterable[str] | Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that runs a test with each case in turn, with the arguments of ``pytest.mark.parametrize``.

    All cases together are one test, which is quicker to collect and to run than hundreds. Each case has its own ``tmp_path``; all
    other fixtures are shared. A group of exceptions has a note with each case that failed.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [(case.values, case.id) if hasattr(case, "marks") else (case if len(arguments) > 1 else (case,), None) for case in cases]
    if ids is not None:
        labels = [ids(*values) for values, _ in rows] if callable(ids) else list(ids)
        rows = [(values, str(label)) for (values, _), label in zip(rows, labels, strict=True)]
    assert rows, "a test without a case tests nothing"

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def in_turn(*instance: Any, **fixtures: Any) -> None:
            failures: list[BaseException] = []
            for number, (values, label) in enumerate(rows):
                case = dict(zip(arguments, values, strict=True))
                if "tmp_path" in fixtures:
                    case["tmp_path"] = _folder(fixtures["tmp_path"] / str(number))
                try:
                    test(*instance, **{**fixtures, **case})
                except (Exception, pytest.fail.Exception) as failure:
                    text = label or ", ".join(f"{name}={case[name]!r}" for name in arguments)
                    failure.add_note(f"in the case {text}")
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(rows)} cases failed", failures)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        in_turn.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return in_turn

    return decorated


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
