"""Export of a synchronisation scheme, and what its library reads."""

import json
import sys

import pytest

from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.synchronisation import mxnet_synchronisation_part, synchronisation_part
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.runtime.schemes import Asp
from dpro_search.runtime.synchronisation import synchronise
from dpro_search.runtime.synchronisation.server_worker import server_of
from dpro_search.runtime.synchronisation.synchronise import _given_scheme
from dpro_search.space.plan import Plan


@pytest.mark.parametrize("scheme", ["ssp(staleness=2)", "diloco(steps=4)"])
def test_the_library_reads_the_exported_file_and_a_plan_file(monkeypatch, tmp_path, scheme):
    plan = Plan.of(synchronisation=scheme)
    part = synchronisation_part(plan, JobFacts())
    for name, content in {**part.files, "plan.json": plan.to_json()}.items():
        (tmp_path / name).write_bytes(content)
        monkeypatch.setenv("DPRO_SEARCH_SYNCHRONISATION", str(tmp_path / name))
        assert _given_scheme() == plan.synchronisation
    assert bool(part.setup) == scheme.startswith("ssp")  # only a parameter server needs Ray


def test_an_mxnet_script_has_the_same_file_and_no_all_reduces():
    plan = Plan.of(synchronisation="adsp(commits=2)")
    part = mxnet_synchronisation_part(plan, JobFacts(framework="mxnet"))
    assert part.files == synchronisation_part(plan, JobFacts()).files
    assert "synchronise(net, trainer)" in part.script[0]
    with pytest.raises(InputError, match="which MXNet's KVStore has not"):
        mxnet_synchronisation_part(Plan.of(synchronisation="local-sgd(steps=4)"), JobFacts(framework="mxnet"))


@pytest.mark.parametrize("content", ["{", "[]", '{"synchronisation": 3}'])
def test_a_file_without_a_scheme_is_named(monkeypatch, tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    monkeypatch.setenv("DPRO_SEARCH_SYNCHRONISATION", str(path))
    with pytest.raises(InputError, match=r"plan\.json"):
        _given_scheme()


def test_a_script_that_names_no_scheme_or_no_rank_is_told(monkeypatch):
    for name in ("DPRO_SEARCH_SYNCHRONISATION", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="name a scheme"):
        synchronise(None, None)
    with pytest.raises(InputError, match="RANK is missing"):
        synchronise(None, None, "adsp")
    with pytest.raises(InputError, match="worker 4 of 4"):
        synchronise(None, None, "adsp", worker=4, workers=4)


def test_a_machine_without_ray_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingCapabilityError, match="pip install"):
        server_of("job", Asp(), 1, None, silent_s=1.0)


def test_a_plan_file_without_the_field_keeps_loading():
    old = json.dumps({"version": 2, "micro_batches": 2}).encode()
    assert Plan.from_json(old).synchronisation is None


def test_the_import_line_of_earlier_exports_still_works():
    from dpro_search.deploy.synchronisation import synchronise as imported_as_before

    assert imported_as_before is synchronise
