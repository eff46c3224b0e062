"""All tables and figures, and one page of them.

    python -m experiments.dpro RESULTS --recordings DIR... [--memory DIR] [--real-runs DIR]

Writes into RESULTS: dpro.md, dpro-PART.svg, and of each part its rows (PART.json) and its section (PART.md). What is there already
is not computed again. About half an hour for 60 recordings, most of it searches.
"""

from __future__ import annotations

import shlex
import sys
import time

from benchmarks.measure import machine
from dpro_search import __version__
from dpro_search.collect._files import write_file
from experiments.dpro.alignment import alignment
from experiments.dpro.gains import gains
from experiments.dpro.memory import memory
from experiments.dpro.parts import all_parts
from experiments.dpro.replay_accuracy import replay_accuracy


def main() -> None:
    """Everything."""
    options, sections = all_parts((replay_accuracy, alignment, gains, memory), __doc__)
    head = [
        "# The tables and figures of the dPRO paper, on our testbed",
        "",
        f"Made by dpro-search {__version__} on {time.strftime('%Y-%m-%d')} ({machine()}):",
        "",
        f"    python -m experiments.dpro {shlex.join(sys.argv[1:])}",
        "",
    ]
    write_file(options.results / "dpro.md", "\n".join([*head, *sections]).encode())
    print(options.results / "dpro.md")


if __name__ == "__main__":
    main()
