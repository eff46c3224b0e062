"""`Journal`: finished trainings, a line of JSON each, so that a campaign goes on where it was interrupted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.adsp.cases import Case


class Journal:
    """A file with a record of each finished case."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut off when the campaign was interrupted
            self._records[Case(**record["case"]).key] = record

    def __contains__(self, case: Case) -> bool:
        return case.key in self._records

    def records(self, experiment: str) -> list[dict[str, Any]]:
        """Those of an experiment."""
        return [record for record in self._records.values() if record["case"]["experiment"] == experiment]

    def add(self, case: Case, **facts: Any) -> None:
        """Append a record."""
        record = {"case": asdict(case), **facts}
        self._records[case.key] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
