"""Damaged copies of each file of our own, one of each kind of damage: read or refused in one line, within limits.

Of the formats that `import` reads, `tests/collect/importer_kit.py` makes damaged copies; `python -m tests.faults.flips` makes more.
"""

import pytest

from tests.collect.importer_kit import DAMAGES
from tests.faults.flips import OWN, campaign

pytestmark = [pytest.mark.integration, pytest.mark.one_core]  # for its two minutes


@pytest.mark.parametrize("form", OWN)
def test_a_damaged_file_is_read_or_refused_in_one_line(form, tmp_path):
    row = campaign(form, tmp_path / "copies", range(len(DAMAGES)))
    assert row["bad"] == []
    assert row["copies"] == len(DAMAGES)
