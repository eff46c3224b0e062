"""Published TPU runs beside predictions from compiled programs: python -m experiments.xla {list,compile,table} ROWS"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.xla.published import compile_all, read_rows, requests_of
from experiments.xla.table import lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("list", "compile", "table"))
    parser.add_argument("rows", type=Path, help="tpu.csv.gz")
    arguments = parser.parse_args()
    rows = read_rows(arguments.rows)
    if arguments.what == "list":
        for request in requests_of(rows):
            state = "done" if request.folder.exists() else "failed" if request.error_file.exists() else "to do"
            print(request.key, state, request.on, request.mesh, request.config["layers"], request.config["hidden"])
    elif arguments.what == "compile":
        compile_all(rows)
    else:
        print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
