"""Answers to the questions of ``questions.toml``, beside what came out.

``python -m experiments.questions [--json]`` prints the figures; ``--page FILE`` writes the page of all answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from experiments.questions.answers import answered, summary
from experiments.questions.names import table
from experiments.questions.page import page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.questions", description=__doc__)
    parser.add_argument("--page", type=Path, help="write all answers to this file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    answers = []
    for question in table("questions.toml")["question"]:
        print(question["id"], end=" ", file=sys.stderr, flush=True)
        answers.append(answered(question))
    print(file=sys.stderr)
    if options.page is not None:
        options.page.write_text(page(answers))
    figures = summary(answers)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
