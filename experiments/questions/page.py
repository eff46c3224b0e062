"""`page`: all answers as one page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.questions.answers import Answer, summary

_HEAD = """# Fifty questions from public threads

People asked these questions in public, and the outcome is known. The list was [written down](README.md) before any of them was
answered; `python -m experiments.questions --page experiments/questions/page.md` writes this page. A job's file holds what the
thread says; `questions.toml` has it with the words that prove the outcome. An answer agrees where what came out lies in its 90
% interval, where it fits or does not, where the first of an order is right, and where the cause is among the first three.
"""
_TITLES = {
    "time": "How fast should it be?",
    "memory": "How much memory does it need?",
    "fits": "Does it fit?",
    "ranking": "Which is faster?",
    "cause": "Why is it slow, or large?",
}


def page(answers: Sequence[Answer]) -> str:
    """The page."""
    figures = [f"| {name.replace('_', ' ')} | {value} |" for name, value in summary(answers).items()]
    parts = [_HEAD, "| figure | value |", "|---|---|", *figures, ""]
    for kind, title in _TITLES.items():
        parts += [f"## {title}", "", "| question | asked with | answer | came out | agrees |", "|---|---|---|---|---|"]
        parts += [_row(one) for one in answers if one.kind == kind]
        parts.append("")
    return "\n".join(parts)


def _row(one: Answer) -> str:
    agrees = "refused" if one.agrees is None else "yes" if one.agrees else "**no**"
    error = "" if one.error is None else f" ({one.error:+.0%})"
    cells = (
        f"[{one.question['id']}]({one.question['link']}): {one.question['asked']}",
        f"`{one.command}`",
        one.said + error,
        one.outcome,
        agrees,
    )
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
