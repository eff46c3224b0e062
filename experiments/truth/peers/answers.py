"""``answer(of)``: a peer's side of the exchange: a job a line in, what `of` makes of it a line out. Standard library only."""

import json
import os
import sys


def answer(of):
    """Answer every job on the standard input; what packages print goes to the standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found = of(json.loads(line))
        except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        out.write(json.dumps(found) + "\n")
