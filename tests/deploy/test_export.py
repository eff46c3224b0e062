"""A plan is exported to the systems that follow it together, in one folder, or refused with the reason."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from dpro_search.collect.modules import LoweredOps, ModuleInfo
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.part import JobFacts, Servers
from dpro_search.deploy.targets import parts_of, targets_for
from dpro_search.errors import InputError
from dpro_search.kinds import all_targets, kind_of, recorded_job
from dpro_search.space.plan import Plan, Prediction, setting_names
from dpro_search.space.schemes import scheme_types
from tests.every_case import every_case
from tests.in_process import succeeds
from tests.recordings import trace_of
from tests.sample import horovod_trace_path

T = SimpleNamespace(**{target.name.upper(): target for target in reversed(all_targets())})


def prediction(us):
    return Prediction(iteration_us=us, interval_us=(us - 5e3, us + 5e3), breakdown_us={}, peak_memory_bytes=None, source="recorded")


@every_case(
    ("plan", "target", "env"),
    [
        (
            Plan.of(fusion_threshold_bytes=0, cycle_time_us=2500.0),
            T.HOROVOD,
            {"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CYCLE_TIME": "2.5"},
        ),
        (Plan(servers=3), T.MXNET, {"DMLC_NUM_SERVER": "3"}),
        (Plan(servers_on_workers=True), T.MXNET, {"DPRO_SEARCH_SERVER_HOSTS": "workers"}),
        (Plan(servers_on_workers=False), T.BYTEPS, {"DPRO_SEARCH_SERVER_HOSTS": "own"}),
        (Plan.of(bigarray_bound=1000), T.MXNET, {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}),
        (
            Plan.of(p3=True, slice_threshold=400),
            T.MXNET,
            {"DMLC_PS_VAN_TYPE": "p3", "MXNET_UPDATE_ON_KVSTORE": "0", "MXNET_KVSTORE_SLICE_THRESHOLD": "400"},
        ),
        (
            Plan.of(partition_bytes=1024, credit=4, servers=1),
            T.BYTEPS,
            {"BYTEPS_PARTITION_BYTES": "1024", "BYTEPS_SCHEDULING_CREDIT": "4", "DMLC_NUM_SERVER": "1"},
        ),
    ],
)  # fmt: skip
def test_knobs_become_the_systems_own_variables(plan, target, env):
    part = parts_of(plan, (target,))[target]
    assert part.env == env
    assert not part.files
    assert not part.script


@every_case(
    ("plan", "targets", "reason"),
    [
        (Plan(op_clusters=(("a",),)), (T.HOROVOD,), "op_clusters: horovod cannot express it .known to: xla; choose with --target"),
        (Plan(bfloat16_ops=("a",)), (T.DDP, T.PYTORCH), "autocast takes modules"),
        (Plan(recomputed_ops=("a",)), (T.DDP, T.PYTORCH), "checkpointing takes modules"),
        (Plan(recomputed_modules=("a",)), (T.TENSORFLOW,), "recomputed_modules: tensorflow cannot express it .known to: pytorch;"),
        (Plan(compression="2bit"), (T.HOROVOD,), "Horovod has fp16, not 2bit"),
        (Plan(compression="fp16"), (T.MXNET,), "KVStore has 2bit, not fp16"),
        (Plan(compression="powersgd-1"), (T.HOROVOD,), "Horovod has fp16, not powersgd-1"),
        (Plan(compression="2bit"), (T.DDP,), "DDP has fp16, bf16 and powersgd-4, powersgd-2, powersgd-1, not 2bit"),
        (Plan.of(compression="2bit", p3=True), (T.MXNET,), "does not compress priority slices"),
        (Plan(servers_on_workers=True), (T.HOROVOD,), "servers_on_workers: horovod cannot express it .known to: mxnet, byteps;"),
        (Plan(servers=2), (T.MXNET, T.BYTEPS), "a job communicates with one of them"),
        (Plan(op_clusters=(("a",),), micro_batches=2), (T.XLA, T.PYTORCH), "--target xla and pytorch: a job has one framework"),
        (Plan(tensor_groups=(("a",),)), (T.DDP,), "needs the recording"),
    ],
)
def test_what_a_target_cannot_express_is_refused_with_the_reason_before_anything_is_written(plan, targets, reason, tmp_path):
    with pytest.raises(InputError, match=reason):
        export_plan(plan, tmp_path / "out", targets, known=all_targets())
    assert not (tmp_path / "out").exists()


def test_an_op_that_the_backward_pass_uses_at_once_is_not_computed_again_and_refused():
    inputs = {"x": [], "a": ["x"], "gradient_tape/square": ["a"]}
    facts = JobFacts(op_types=dict.fromkeys(inputs, "Square"), op_inputs=inputs)
    with pytest.raises(InputError, match="recomputed_ops: the backward pass uses 'a' and all others at once"):
        parts_of(Plan(recomputed_ops=("a",)), (T.TENSORFLOW,), facts)


def test_modules_are_checked_against_the_recording_and_go_with_the_parts_of_a_batch():
    facts = JobFacts(modules=[ModuleInfo(name="layers.0", type="Block", member=True)])
    plan = Plan.of(recomputed_modules=("layers.0",), micro_batches=2, bucket_cap_bytes=2**20)
    parts = parts_of(plan, targets_for(plan, (T.DDP, T.PYTORCH)), facts)
    files = parts[T.PYTORCH].files
    assert set(files) == {"modules.json", "modules.py", "micro_batches.json", "micro_batches.py"}
    assert json.loads(files["modules.json"])["recomputed"] == ["layers.0"]
    assert json.loads(files["modules.json"])["bfloat16"] == []
    assert "before `DistributedDataParallel(model)`" in parts[T.PYTORCH].script[0]
    with pytest.raises(InputError, match=r"the recorded model has no module 'layers\.1' \(it has 'layers\.0'\)"):
        parts_of(Plan(recomputed_modules=("layers.1",)), (T.PYTORCH,), facts)


def test_modules_in_bfloat16_are_checked_against_the_recording_too():
    ops = LoweredOps(forward_us=1.0, backward_us=1.0, ops=(), casts=0, cast_elements=0)
    facts = JobFacts(modules=[ModuleInfo(name="layers.0", type="Block", member=True, lowered=ops)])
    files = parts_of(Plan(bfloat16_modules=("layers.0",)), (T.PYTORCH,), facts)[T.PYTORCH].files
    assert set(files) == {"modules.json", "modules.py"}
    assert json.loads(files["modules.json"])["bfloat16"] == ["layers.0"]
    with pytest.raises(InputError, match=r"bfloat16_modules: the recorded model has no module 'layers\.1'"):
        parts_of(Plan(bfloat16_modules=("layers.1",)), (T.PYTORCH,), facts)


def test_horovod_on_mxnet_has_no_exact_groups():
    with pytest.raises(InputError, match="makes groups by number only"):
        parts_of(Plan(tensor_groups=(("a", "b"),)), (T.HOROVOD,), JobFacts(framework="mxnet"))


def test_every_field_of_a_plan_has_a_target():
    of_tests = {
        name for scheme in scheme_types() if not scheme.__module__.startswith("dpro_search.") for name in scheme.__struct_fields__
    }
    exported = {name for target in all_targets() for name in target.fields}
    assert set(setting_names()) >= exported >= set(setting_names()) - of_tests


def test_the_command_line_names_every_target():
    assert {target.name for target in all_targets()} <= set(re.findall(r"[a-z-]+", succeeds("export", "--help")))


@every_case(
    ("plan", "available", "targets"),
    [
        (Plan.of(cycle_time_us=1.0, op_clusters=(("a",),)), None, (T.HOROVOD, T.XLA)),
        (Plan(tensor_groups=(("a",),)), None, (T.HOROVOD,)),
        (Plan(tensor_groups=(("a",),)), (T.DDP, T.PYTORCH), (T.DDP,)),
        (Plan.of(bucket_cap_bytes=1, micro_batches=2), (T.DDP, T.PYTORCH), (T.DDP, T.PYTORCH)),
        (Plan.of(servers=2, credit=1), None, (T.BYTEPS,)),
        (Plan(op_clusters=(("a",),), micro_batches=2), None, (T.XLA, T.TENSORFLOW)),
        (Plan(), (T.MXNET,), (T.MXNET,)),
    ],
)
def test_a_plan_chooses_its_targets(plan, available, targets):
    chosen_targets = targets_for(plan, all_targets(), T.HOROVOD) if available is None else targets_for(plan, available)
    assert chosen_targets == targets


def test_a_plan_that_two_targets_can_express_needs_a_choice():
    with pytest.raises(InputError, match="mxnet, byteps can express it; choose one with --target"):
        targets_for(Plan(servers=2), all_targets(), T.HOROVOD)


def test_a_plan_for_another_kind_of_job_is_refused():
    with pytest.raises(InputError, match="bucket_cap_bytes: horovod, xla and tensorflow cannot express it"):
        targets_for(Plan.of(bucket_cap_bytes=1), (T.HOROVOD, T.XLA, T.TENSORFLOW))


def test_one_folder_serves_a_plan_of_several_systems(tmp_path):
    plan = Plan.of(
        tensor_groups=(("a#0",),), cycle_time_us=2000.0, op_clusters=(("x", "y"),), bfloat16_ops=("z",), recomputed_ops=("x",),
        micro_batches=2,
    )  # fmt: skip
    exported = export_plan(
        plan, tmp_path / "out", targets_for(plan, all_targets(), T.HOROVOD), expected=(prediction(80e3), prediction(100e3))
    )
    assert exported.helpers == ("micro_batches.py", "tape.py", "xla.py")
    step = json.loads((tmp_path / "out" / "step.json").read_text())
    assert step == {"version": 1, "clusters": [[["x", None], ["y", None]]], "bfloat16": [["z", None]], "recomputed": [["x", None]]}
    assert json.loads((tmp_path / "out" / "micro_batches.json").read_text())["micro_batches"] == 2
    assert Plan.load(tmp_path / "out" / "plan.json") == plan
    readme = (tmp_path / "out" / "README.md").read_text()
    for helper in ("planned_averages", "planned_step", "planned_gradients"):
        assert helper in readme
    assert "Expect 80.0 ms an iteration (75.0 - 85.0 ms, nine times in ten) in place of 100.0 ms: 1.25x" in readme


def test_a_readme_is_five_lines_at_most_for_one_system(tmp_path):
    export_plan(Plan(op_clusters=(("x", "y"),)), tmp_path / "out", (T.XLA,), expected=(prediction(8e4), prediction(1e5)))
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    assert [line[:2] for line in lines[2:]] == ["1.", "2.", "3.", "4."]


@pytest.mark.parametrize("helper", ["ddp", "micro_batches", "tape", "trainer", "xla"])
def test_a_helper_needs_nothing_of_this_package(helper, tmp_path):
    plans = {
        "ddp": Plan.of(bucket_cap_bytes=1), "micro_batches": Plan(micro_batches=2), "tape": Plan(tensor_groups=(("a",),)),
        "trainer": Plan(compression="2bit"), "xla": Plan(op_clusters=(("a",),)),
    }  # fmt: skip
    targets = {"ddp": T.DDP, "micro_batches": T.PYTORCH, "tape": T.HOROVOD, "trainer": T.MXNET, "xla": T.XLA}
    export_plan(plans[helper], tmp_path / "out", (targets[helper],))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'out')!r}); import {helper}; "
        "assert not [name for name in sys.modules if name.startswith(('dpro_search', 'numpy'))]"
    )
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def test_powersgd_begins_when_it_can_and_the_readme_says_how_to_begin_later(tmp_path):
    export_plan(Plan.of(compression="powersgd-2", bucket_cap_bytes=2**20), tmp_path / "out", (T.DDP,))
    facts = json.loads((tmp_path / "out" / "ddp.json").read_text())
    assert (facts["compression"], facts["options"]) == ("powersgd-2", {"bucket_cap_mb": 1.0})
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "orthogonalization_epsilon": 1e-8}
    assert facts["powersgd"] == options
    assert "raise it to a tenth of all steps" in (tmp_path / "out" / "README.md").read_text()


def test_buckets_of_ddp_are_cut_to_the_plans_groups():
    sizes = {"d": 400, "c": 100, "b": 300, "a": 50}
    tensors = [TensorInfo(name=name, node="", dtype="float32", shape=(n // 4,), size_bytes=n) for name, n in sizes.items()]
    facts = JobFacts(framework="pytorch", tensors=tensors, ready_order=True)
    part = parts_of(Plan(tensor_groups=(("d", "c"), ("b",), ("a",))), (T.DDP,), facts)[T.DDP]
    limits = json.loads(part.files["ddp.json"])["options"]["bucket_cap_mb_list"]
    assert [int(limit * 2**20) for limit in limits] == [500, 300, 50]
    with pytest.raises(InputError, match="not such runs"):
        parts_of(Plan(tensor_groups=(("d", "b"), ("c", "a"))), (T.DDP,), facts)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.load(horovod_trace_path())


class TestOfTheSample:
    """A recorded TensorFlow job: its graph is there to check against."""

    def test_its_kind_of_job_can_be_started(self, trace):
        assert kind_of(trace).targets_of(trace.meta.framework)[0] == T.HOROVOD

    def test_two_ops_side_by_side_are_a_cluster_and_two_far_apart_are_none(self, trace):
        facts, graph = kind_of(trace).facts(trace), trace.graphs[0]
        source = next(i for i in range(len(graph.name)) if graph.op[i] == "Relu")
        user = next(i for i in range(len(graph.name)) if source in graph.input_idx[graph.input_ptr[i] : graph.input_ptr[i + 1]])
        near = Plan(op_clusters=((graph.name[source], graph.name[user]),))
        (cluster,) = parts_of(near, (T.XLA,), facts)[T.XLA].step["clusters"]
        assert cluster == [(graph.name[source], "Relu"), (graph.name[user], graph.op[user])]
        last = [name for name in graph.name if "AssignSub" in name or "AssignAdd" in name or "ResourceApply" in name][-1]
        with pytest.raises(InputError, match=r"op_clusters: cluster 0 .* is not convex"):
            parts_of(Plan(op_clusters=((graph.name[source], last),)), (T.XLA,), facts)

    def test_an_op_of_another_model_is_refused(self, trace):
        with pytest.raises(InputError, match="the recorded step has no op 'nobody'"):
            parts_of(Plan(bfloat16_ops=("nobody",)), (T.TENSORFLOW,), kind_of(trace).facts(trace))


def test_limits_in_mib_are_exact_in_bytes():
    sizes = np.random.default_rng(1).integers(1, 2**31, 1000)
    assert [int(size / 2**20 * 2**20) for size in sizes.tolist()] == sizes.tolist()


@pytest.mark.parametrize(
    ("servers", "sentences"),
    [
        (4, "The plan has 4 servers where 2 were recorded: it needs 2 more hosts, with links like the others'."),
        (3, "The plan has 3 servers where 2 were recorded: it needs 1 more host, with links like the others'."),
        (2, None),
        (1, None),
    ],
)
def test_more_servers_than_were_recorded_need_hosts_in_the_readme(servers, sentences, tmp_path):
    exported = export_plan(Plan(servers=servers), tmp_path / "out", (T.MXNET,), JobFacts(servers=Servers(2)))
    readme = (tmp_path / "out" / "README.md").read_text()
    assert ("more host" in readme) == ("more host" in exported.usage) == (sentences is not None)
    if sentences is not None:
        assert sentences in readme
        assert sentences in exported.usage


@pytest.mark.parametrize(
    ("plan", "recorded", "sentences"),
    [
        (Plan(servers=4, servers_on_workers=True), Servers(2), ["Start server N on the host of worker N, cyclically."]),
        (Plan(servers=4), Servers(2, on_workers=True), []),
        (
            Plan(servers_on_workers=False),
            Servers(2, on_workers=True),
            [
                "Start each server on a host of its own.",
                "The plan has servers on hosts of their own where the recorded ones were on the workers': "
                "it needs 2 more hosts, with links like the others'.",
            ],
        ),
    ],
)
def test_the_readme_says_where_to_start_servers_and_which_hosts_they_need(plan, recorded, sentences, tmp_path):
    exported = export_plan(plan, tmp_path / "out", (T.BYTEPS,), JobFacts(servers=recorded))
    readme = (tmp_path / "out" / "README.md").read_text()
    assert all(sentence in readme and sentence in exported.usage for sentence in sentences)
    assert readme.count("Start ") == 1 + sum(sentence.startswith("Start ") for sentence in sentences)  # that of the job as well
    assert ("more host" in readme) == any("more host" in sentence for sentence in sentences)


def test_how_many_servers_a_recording_had(trace):
    recorded = trace_of("byteps_mlp")
    assert kind_of(recorded).facts(recorded).servers == Servers(2)
    assert kind_of(trace).facts(trace).servers == Servers(0)


@pytest.mark.parametrize(("hosts", "placed"), [(("h0", "h1", "h2", "h3"), "own"), (("h0", "h1", "h1", "h0"), "workers")])
def test_a_recorded_job_is_started_with_servers_where_they_were(hosts, placed):
    recorded = trace_of("byteps_mlp")
    knobs = {**recorded.meta.knobs, "DPRO_SEARCH_SERVER_HOSTS": placed}
    meta = msgspec.structs.replace(recorded.meta, hosts=hosts, knobs=knobs)
    job = recorded_job(replace(recorded, meta=meta))
    assert job.spec.env["DPRO_SEARCH_SERVER_HOSTS"] == placed
    assert job.facts.servers == Servers(2, on_workers=placed == "workers")
    assert job.shaped


def test_recordings_of_before_there_was_a_choice_have_servers_on_hosts_of_their_own():
    recorded = trace_of("byteps_mlp")
    assert recorded_job(recorded).spec.env["DPRO_SEARCH_SERVER_HOSTS"] == "own"
