"""An exported plan is a folder that a stock Horovod job can follow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.deploy.export import ExportedFiles, export_plan
from dpro_search.deploy.parts.horovod import HOROVOD, horovod_environment
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.space.plan import Plan

GROUPED = Plan(tensor_groups=(("a#0", "c#2"), ("b#1",)))


def test_the_empty_plan_sets_nothing() -> None:
    assert horovod_environment(Plan()) == {}


def test_settings_have_horovods_units() -> None:
    plan = Plan.of(fusion_threshold_bytes=0, cycle_time_us=2500.0)
    assert horovod_environment(plan) == {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "2.5"}


def test_exact_groups_are_kept_from_merging() -> None:
    assert horovod_environment(GROUPED)["HOROVOD_DISABLE_GROUP_FUSION"] == "1"


@pytest.mark.parametrize(("threshold_bytes", "largest_bytes"), [(None, 0), (0, 0), (1024, 0), (2**20, 2**29), (2**30, 2**29)])
def test_exact_groups_are_kept_from_splitting(threshold_bytes: int | None, largest_bytes: int) -> None:
    plan = Plan.of(tensor_groups=GROUPED.tensor_groups, fusion_threshold_bytes=threshold_bytes)
    exported = int(horovod_environment(plan, largest_group_bytes=largest_bytes)["HOROVOD_FUSION_THRESHOLD"])
    assert exported >= max(largest_bytes, threshold_bytes or 0, 1)


def test_a_plan_without_groups_needs_no_change_of_the_script(tmp_path: Path) -> None:
    exported = export_plan(Plan.of(cycle_time_us=5000), tmp_path / "out", (HOROVOD,))
    assert exported.files == ("README.md", "horovod.env", "plan.json")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(exported.files)


def test_groups_are_written_as_the_plan_has_them(tmp_path: Path) -> None:
    export_plan(GROUPED, tmp_path / "out", (HOROVOD,))
    assert json.loads((tmp_path / "out" / "groups.json").read_text())["groups"] == [["a#0", "c#2"], ["b#1"]]


def test_algorithms_are_rules_of_open_mpi(tmp_path: Path) -> None:
    plan = Plan.of(allreduce_algorithms=((0, "recursive-doubling"), (65536, "rabenseifner")), cycle_time_us=5000)
    exported = export_plan(plan, tmp_path / "out", (HOROVOD,), JobFacts(framework="tensorflow", on_mpi=True))
    rules = tmp_path / "out" / "allreduce.rules"
    numbers = [line.split("#")[0].split() for line in rules.read_text().splitlines()]
    assert numbers == [["1"], ["2"], ["1"], ["1"], ["2"], ["0", "3", "0", "0"], ["65536", "6", "0", "0"]]
    assert exported.env == {
        "HOROVOD_CYCLE_TIME": "5",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(rules.resolve()),
    }
    assert "PYTHONPATH" not in exported.usage


def test_algorithms_beside_groups_and_compression_are_written_too(tmp_path: Path) -> None:
    plan = Plan.of(allreduce_algorithms=((0, "ring"),), tensor_groups=GROUPED.tensor_groups, compression="fp16")
    exported = export_plan(plan, tmp_path / "out", (HOROVOD,), JobFacts(framework="tensorflow", on_mpi=True))
    assert {"allreduce.rules", "groups.json", "tape.py"} <= set(exported.files)


def test_algorithms_for_a_job_on_gloo_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="which has one algorithm"):
        export_plan(Plan.of(allreduce_algorithms=((0, "ring"),)), tmp_path / "out", (HOROVOD,), JobFacts(on_mpi=False))
    assert not (tmp_path / "out").exists()


def numbers_of(path: Path) -> list[str]:
    return [line.split("#")[0].strip() for line in path.read_text().splitlines()]


def test_a_hierarchy_is_rules_of_two_components(tmp_path: Path) -> None:
    plan = Plan.of(allreduce_algorithms=((0, "hierarchy"), (65536, "rabenseifner"), (262144, "hierarchy")))
    facts = JobFacts(framework="tensorflow", on_mpi=True, ranks=8, ranks_per_host=2)
    exported = export_plan(plan, tmp_path / "out", (HOROVOD,), facts)
    among_four_hosts, all_ranks = ["4", "1", "0 4 0 0"], ["8", "1", "0 6 0 0"]
    assert numbers_of(tmp_path / "out" / "allreduce.rules") == ["1", "2", "2", *among_four_hosts, *all_ranks]
    first = numbers_of(tmp_path / "out" / "hierarchy.rules")[:13]
    assert first == ["8", "2", "2", "1", "1", "1", "1", "0 tuned", "2", "1", "1", "3", "0 han"]
    assert numbers_of(tmp_path / "out" / "hierarchy.rules")[13:15] == ["65536 libnbc", "262144 han"]
    assert exported.env["OMPI_MCA_coll_han_dynamic_rules_filename"] == str((tmp_path / "out" / "hierarchy.rules").resolve())
    assert "`allreduce.rules` and `hierarchy.rules` lie at the same path" in exported.usage


def test_a_hierarchy_of_two_hosts_is_one_exchange_between_them(tmp_path: Path) -> None:
    facts = JobFacts(on_mpi=True, ranks=4, ranks_per_host=2)
    export_plan(Plan.of(allreduce_algorithms=((0, "hierarchy"),)), tmp_path / "out", (HOROVOD,), facts)
    assert numbers_of(tmp_path / "out" / "allreduce.rules") == ["1", "2", "1", "2", "1", "0 3 0 0"]


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (JobFacts(on_mpi=True, ranks=4, ranks_per_host=1), "several ranks on a host"),
        (JobFacts(on_mpi=True, ranks=4), "a recording with the same number of ranks on every host"),
        (JobFacts(), "a recording with the same number of ranks on every host"),
        (JobFacts(on_mpi=False, ranks=4, ranks_per_host=2), "which has one algorithm"),
    ],
)
def test_a_hierarchy_without_use_is_refused_with_the_reason(facts: JobFacts, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        export_plan(Plan.of(allreduce_algorithms=((0, "hierarchy"),)), tmp_path / "out", (HOROVOD,), facts)
    assert not (tmp_path / "out").exists()


def test_the_exported_plan_is_the_plan(tmp_path: Path) -> None:
    export_plan(GROUPED, tmp_path / "out", (HOROVOD,))
    assert Plan.load(tmp_path / "out" / "plan.json") == GROUPED


def test_the_environment_file_is_understood_by_a_shell(tmp_path: Path) -> None:
    assert environment_of(export_plan(GROUPED, tmp_path / "out", (HOROVOD,))).items() >= horovod_environment(GROUPED).items()


def environment_of(exported: ExportedFiles) -> dict[str, str]:
    """What a job sees that is started as the export says."""
    command = exported.usage.split("`")[1].replace(HOROVOD.start, "env -0")
    output = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in output.split("\0")[:-1])


@pytest.mark.parametrize("name", ["my plan", "$(touch harm)", "it's; touch harm", "a&&b", "ä*"])
def test_a_folder_of_any_name_is_quoted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = Plan.of(allreduce_algorithms=((0, "ring"),))
    exported = export_plan(plan, Path(name), (HOROVOD,), JobFacts(framework="tensorflow", on_mpi=True))
    rules = environment_of(exported)["OMPI_MCA_coll_tuned_dynamic_rules_filename"]
    assert Path(rules).read_text().startswith("1  # collective")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "plan"), [("two\nlines", Plan.of(cycle_time_us=1.0)), ("a:b", GROUPED)])
def test_a_name_that_no_command_can_have_is_refused(name: str, plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose another"):
        export_plan(plan, tmp_path / name, (HOROVOD,))
    assert not any(tmp_path.iterdir())


def test_keras_is_told_of_its_argument(tmp_path: Path) -> None:
    exported = export_plan(GROUPED, tmp_path / "out", (HOROVOD,))
    assert "groups=planned_groups(model.trainable_variables)" in exported.usage
    assert "DistributedOptimizer" in (tmp_path / "out" / "README.md").read_text()


def test_the_helper_needs_nothing_of_this_package(tmp_path: Path) -> None:
    export_plan(GROUPED, tmp_path / "out", (HOROVOD,))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'out')!r}); import tape; "
        "assert not [name for name in sys.modules if name.startswith('dpro_search')]"
    )
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def test_stock_groups_are_refused_when_two_variables_have_one_name(tmp_path: Path) -> None:
    export_plan(Plan(tensor_groups=(("twin#0", "twin#1"),)), tmp_path / "out", (HOROVOD,))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'out')!r}); import tape; "
        "from types import SimpleNamespace as V; tape.planned_groups([V(name='twin:0'), V(name='twin:0')])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert "ValueError: two variables are named 'twin:0'" in done.stderr


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        export_plan(GROUPED, tmp_path, (HOROVOD,))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((InputError, MissingCapabilityError), match="cannot be written"):
        export_plan(GROUPED, tmp_path / "file" / "out", (HOROVOD,))
