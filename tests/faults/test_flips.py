"""Damaged copies of each file of our own, one of each kind of damage: read or refused in one line, within limits.

Of the formats that `import` reads, `tests/collect/importer_kit.py` makes damaged copies; `python -m tests.faults.flips` makes more.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collect.importer_kit import DAMAGES
from tests.faults.flips import OWN

pytestmark = [pytest.mark.integration, pytest.mark.one_core]  # for its two minutes
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("form", OWN)
def test_a_damaged_file_is_read_or_refused_in_one_line(form):
    # In a process of its own: it forks, and threads that other tests have started do not live on in what is forked.
    command = [sys.executable, "-m", "tests.faults.flips", form, "--tries", str(len(DAMAGES))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    row = json.loads(done.stdout)
    assert row["bad"] == []
    assert row["copies"] == len(DAMAGES)
