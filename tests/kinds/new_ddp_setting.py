"""`python new_ddp_setting.py FOLDER TRACE`: asks for `short_forward` of a DDP job wherever settings are written and read.

FOLDER has the modules of the package that declare it, at their paths; they take the place of the package's.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

CHANGED, TRACE = Path(sys.argv[1]), Path(sys.argv[2])


class ChangedFinder:
    """Finds modules in the folder before those of the package."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        file = CHANGED / Path(*name.split(".")).with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None


sys.meta_path.insert(0, ChangedFinder())

from dpro_search.errors import InputError  # noqa: E402
from dpro_search.kinds import job_of, load_source  # noqa: E402
from dpro_search.space.describe import describe  # noqa: E402
from dpro_search.space.plan import Plan  # noqa: E402

job = job_of(load_source(TRACE))
scenario = job.job.scenario(["short_forward=1"])
plan = scenario.plan
assert plan == Plan.of(short_forward=True), "--set reads it"
assert Plan.from_json(plan.to_json()) == plan, "a plan's file holds it"
assert describe(plan) == "short forward pass", "tables describe it"
assert "short_forward" in job.space.fields, "a search proposes it"
assert job.predict(plan).iteration_us < job.predict(Plan()).iteration_us, "it changes the prediction"
assert any(choice.name == "short-forward" for choice in job.space.choices), "samplers draw it"
with pytest.raises(InputError, match="short_forward"):
    job.job.scenario(["short_forward=maybe"])
