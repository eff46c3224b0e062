"""`python new_setting.py STRATEGY.PY JOB.TOML`: asks for `new_setting` of a job wherever settings are written and read.

STRATEGY.PY takes the place of the package's schema of settings and declares `new_setting`.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

NAME = "dpro_search.parallel.strategy"


class SchemaFinder:
    """Finds the schema in another file than the package's."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME:
            return None
        return importlib.util.spec_from_file_location(name, sys.argv[1])


sys.meta_path.insert(0, SchemaFinder())

from dpro_search.errors import InputError  # noqa: E402
from dpro_search.kinds import job_of, load_source  # noqa: E402
from dpro_search.parallel.export.workloads import refuse_details  # noqa: E402
from dpro_search.parallel.search.changes import change_text, single_changes  # noqa: E402
from dpro_search.parallel.search.ranking import family  # noqa: E402
from dpro_search.report.parallel import _label  # noqa: E402
from dpro_search.space.describe import describe  # noqa: E402
from dpro_search.space.plan import Plan  # noqa: E402

job = job_of(load_source(Path(sys.argv[2])))
assert job.space.today.new_setting == 3, "the file sets it"
scenario = job.job.scenario(["new_setting=2"])
plan = scenario.plan
assert plan == Plan.of(new_setting=2), "--set reads it"
assert Plan.from_json(plan.to_json()) == plan, "a plan's file holds it"
assert describe(plan) == "new setting 2", "tables describe it"
strategy = job.space.strategy(plan)
assert strategy.new_setting == 2, "a plan sets it"
assert job.space.plan(strategy) == plan, "the shortest plan of a strategy names it"
assert family(strategy) != family(job.space.today), "it tells plans apart"
assert job.job.plan_facts(job, plan).strategy["new_setting"] == 2, "JSON has it"
assert job.predict(plan).iteration_us > 0
assert "new_setting=6" in map(change_text, single_changes(job.space.today)), "a diagnosis tries it"
assert _label("new_setting") == "the new one", "the page labels it"
with pytest.raises(InputError, match="new_setting: torchtitan cannot express it"):
    refuse_details("torchtitan", strategy)
with pytest.raises(InputError, match="new_setting must be > 0"):
    Plan.of(new_setting=0)
