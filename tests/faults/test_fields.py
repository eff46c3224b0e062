"""Files with one wrong field, a few of each format; `python -m tests.faults.fields` makes thousands."""

import pytest

from tests.every_case import every_case
from tests.faults.fields import FORMATS, campaign

QUICK = {  # inputs of each format, chosen by their seeds: those that once ended in a traceback or a warning, and some more
    "config.json": (1039, 0, 1),
    "job.toml": (0,),
    "device.toml": (0, 1),
    "machine.toml": (0, 1),
    "plan.json": (0, 1),
    "kineto": (0,),
    "trace.npz": (4, 19),
    "times.json": (2, 26, 44),
    "table.jsonl": (0,),
}


@every_case("name", QUICK)
def test_a_wrong_field_is_refused_in_one_line_or_harmless(name):
    assert campaign(name, QUICK[name])["bad"] == []


@pytest.mark.integration
@pytest.mark.one_core
@pytest.mark.parametrize("name", FORMATS)
def test_many_wrong_fields_of_every_format(name):
    assert campaign(name, range(20))["bad"] == []
