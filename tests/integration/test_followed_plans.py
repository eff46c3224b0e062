"""Real jobs of every framework under an exported plan: they follow it, train the same, and say so where they do not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import PYTORCH_DDP, TENSORFLOW_HOROVOD
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.costmodel.precision import BUNDLED_TORCH_TABLE
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.losses import compare, tolerance_of
from dpro_search.deploy.parts.horovod import HOROVOD, horovod_environment
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.validate import validate
from dpro_search.errors import InputError, JobError
from dpro_search.kinds import PlanOptions, job_of, kinds, recorded_job
from dpro_search.kinds._program import program_replay
from dpro_search.kinds.horovod.job import Horovod, horovod_schedule
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario

pytestmark = pytest.mark.integration

WORKLOADS = Path(__file__).parents[2] / "experiments" / "workloads"
TORCH_JOB = Path(__file__).with_name("planned_ddp_job.py")
FSDP_JOB = Path(__file__).with_name("planned_fsdp_job.py")
KVSTORE_JOB = Path(__file__).with_name("kvstore_job.py")
HOROVOD_JOB = Path(__file__).with_name("planned_horovod_job.py")
KERAS_JOB = Path(__file__).with_name("planned_keras_job.py")
GROUPED = (("left", 0, 0), ("right", 3, 18))  # layers of that job, and the numbers of their kernels


def job(kind, command, framework, **env):
    spec = JobSpec(command=tuple(map(str, command)), ranks=2, cores=default_cores(2), env={"OMP_NUM_THREADS": "1", **env})
    kind_of_job, launcher = next((k, each) for k in kinds() for each in k.launchers if each.format == kind)
    targets, facts = kind_of_job.targets_of(launcher.framework), JobFacts(framework=framework)
    return RecordedJob(launcher=launcher, targets=targets, spec=spec, facts=facts, rate_bps=None, shaped=False)


def verdict(job, plan, base):
    """What the losses of a run under a plan say, beside those of a run as recorded."""
    return compare([base.losses], [job.run(plan, warmup=2).losses], tolerance_of(plan))


@pytest.fixture(scope="module")
def tensorflow_job(tensorflow_python):
    command = (tensorflow_python, WORKLOADS / "train.py", "--model", "vgg16", "--batch", 2, "--steps", 9)
    return job("tensorflow-horovod", command, "tensorflow")


@pytest.fixture(scope="module")
def tensorflow_base(tensorflow_job):
    return tensorflow_job.run(Plan(), warmup=2)


def test_tensorflow_follows_groups_and_clusters_together(tensorflow_job, tensorflow_base):
    plan = Plan(
        tensor_groups=(("dense_2/bias#31", "dense_2/kernel#30"), ("dense_1/bias#29", "dense_1/kernel#28")),
        op_clusters=(("sequential/dense/BiasAdd", "sequential/dense/Relu"),),
    )
    assert len(tensorflow_base.losses) == 9
    outcome = verdict(tensorflow_job, plan, tensorflow_base)
    assert outcome.verdict == "same", outcome.reason


def test_keras_fit_follows_groups_and_is_told_how(tensorflow_python):
    groups = tuple((f"dense_{i}/bias#{2 * i + 1}", f"dense_{i}/kernel#{2 * i}") for i in (3, 2, 1))
    keras = job("tensorflow-horovod", (tensorflow_python, KERAS_JOB), "tensorflow")
    outcome = verdict(keras, Plan(tensor_groups=groups), keras.run(Plan(), warmup=2))
    assert outcome.compared == 12
    assert outcome.verdict == "same", outcome.reason
    ignores = replace(keras, spec=replace(keras.spec, command=(*keras.spec.command, "ignore")))
    with pytest.raises(JobError, match=r"planned_groups for groups= of hvd\.DistributedOptimizer"):
        ignores.run(Plan(tensor_groups=groups), warmup=2)


def test_tensorflow_accumulates(tensorflow_job, tensorflow_base):
    outcome = verdict(tensorflow_job, Plan(micro_batches=2), tensorflow_base)
    assert outcome.verdict == "same", outcome.reason


def test_ranks_that_compute_ops_again_agree_on_their_tensors(tensorflow_python):
    plain = job("tensorflow-horovod", (tensorflow_python, HOROVOD_JOB), "tensorflow")
    again = tuple(f"block_{i}/{name}" for i in range(6) for name in (f"left_{i}/BiasAdd", "Tanh", f"right_{i}/BiasAdd", "Sigmoid"))
    outcome = verdict(plain, Plan(recomputed_ops=again), plain.run(Plan(), warmup=2))
    assert outcome.compared == 20
    assert outcome.verdict == "same", outcome.reason


def test_a_recording_under_exact_groups_knows_them_and_is_replayed_with_them(tensorflow_python, tmp_path):
    groups = tuple((f"block_{i}/{layer}_{i}/kernel#{n}", f"block_{i}/{layer}_{i}/bias#{n + 1}") for layer, i, n in GROUPED)
    export_plan(Plan(tensor_groups=groups), tmp_path / "plan", (HOROVOD,))
    env = horovod_environment(Plan(tensor_groups=groups)) | {"DPRO_SEARCH_PLAN": str(tmp_path / "plan"), "OMP_NUM_THREADS": "1"}
    spec = JobSpec(command=(tensorflow_python, str(HOROVOD_JOB)), ranks=2, cores=default_cores(2), env=env)
    trace = TENSORFLOW_HOROVOD.record(spec, tmp_path / "trace", schedule=StepSchedule(warmup=3, untraced=5, traced=6))
    assert {frozenset(group) for group in trace.meta.settings.groups} == set(map(frozenset, groups))
    assert recorded_job(trace).spec.env["HOROVOD_DISABLE_GROUP_FUSION"] == "1"
    recorded = horovod_schedule(Horovod.of(trace, PlanOptions()).lower(Scenario())).job
    assert recorded.exact_groups
    assert len(recorded.unit_bytes) == len(trace.tensors) - len(groups)


@pytest.fixture(scope="module")
def torch_job(torch_python):
    return job("pytorch-ddp", (torch_python, TORCH_JOB), "pytorch")


@pytest.fixture(scope="module")
def torch_base(torch_job):
    return torch_job.run(Plan(), warmup=2)


@pytest.mark.parametrize("plan", [Plan.of(bucket_cap_bytes=20_000), Plan(micro_batches=4), Plan(compression="fp16")])
def test_pytorch_trains_the_same(torch_job, torch_base, plan):
    outcome = verdict(torch_job, plan, torch_base)
    assert outcome.verdict == "same", outcome.reason


@pytest.fixture(scope="module")
def torch_trace(torch_job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "trace"
    PYTORCH_DDP.record(torch_job.spec, folder, schedule=StepSchedule(warmup=2, untraced=4, traced=4))
    return Trace.load(folder)


def with_own_data(torch_job, sent):
    return replace(torch_job, spec=replace(torch_job.spec, env={**torch_job.spec.env, "SENT_TO": str(sent)}))


@pytest.fixture(scope="module")
def own_data_base(torch_job, tmp_path_factory):
    return with_own_data(torch_job, tmp_path_factory.mktemp("base") / "sent").run(Plan(), warmup=2)


@pytest.mark.parametrize("rank", [1, 4])
def test_powersgd_sends_what_was_predicted_and_ranks_with_data_of_their_own_stay_equal(
    torch_job, own_data_base, torch_trace, tmp_path, rank
):
    prices = job_of(torch_trace, PlanOptions(allow_lossy=True))
    plan = Plan.of(compression=f"powersgd-{rank}", bucket_cap_bytes=10_000)
    run = with_own_data(torch_job, tmp_path / "sent").run(plan, warmup=2)
    first, second = (json.loads((tmp_path / f"sent-{number}").read_text()) for number in range(2))
    predicted = program_replay(prices.lowered(plan)).job.size_bytes.tolist()
    assert len(predicted) > 2 * 3  # several buckets, whose all-reduces could meet
    assert first["bytes"] == second["bytes"] == predicted
    assert sum(predicted) < sum(tensor.size_bytes for tensor in torch_trace.tensors) / 4
    assert first["parameters"] == second["parameters"]
    fell = [losses[0].value - losses[-1].value for losses in (run.losses, own_data_base.losses)]
    assert fell[0] > 0.5 * fell[1] > 0


@pytest.fixture(scope="module")
def fsdp_job(torch_python):
    return job("pytorch-fsdp", (torch_python, FSDP_JOB), "pytorch")


@pytest.fixture(scope="module")
def fsdp_base(fsdp_job):
    return fsdp_job.run(Plan(), warmup=2)


@pytest.mark.parametrize(
    ("plan", "gathers"), [(Plan.of(prefetch=True), 7), (Plan.of(reshard_after_forward=False), 4)], ids=["prefetch", "keep"]
)
def test_a_fully_sharded_job_trains_the_same_and_gathers_what_its_plan_says(fsdp_job, fsdp_base, tmp_path, plan, gathers):
    """Of four units the root keeps its parameters until the backward pass: as recorded, the three layers are gathered again."""
    spec = replace(fsdp_job.spec, env={**fsdp_job.spec.env, "GATHERS_TO": str(tmp_path / "gathers")})
    outcome = verdict(replace(fsdp_job, spec=spec), plan, fsdp_base)
    assert outcome.verdict == "same", outcome.reason
    assert int((tmp_path / "gathers").read_text()) == gathers


@pytest.fixture(scope="module")
def blocks_job(torch_job):
    """Of three blocks with batch normalisation and dropout."""
    return replace(torch_job, spec=replace(torch_job.spec, env={**torch_job.spec.env, "MODEL": "blocks"}))


def test_modules_that_are_computed_again_train_the_same_to_the_last_bit(blocks_job, tmp_path):
    collected = []
    parts = Plan.of(micro_batches=2, bucket_cap_bytes=20_000)
    for name, plan in [("as-written", parts), ("again", parts.changed(recomputed_modules=("0", "2")))]:
        spec = replace(blocks_job.spec, env={**blocks_job.spec.env, "STATE_TO": str(tmp_path / name)})
        run = replace(blocks_job, spec=spec).run(plan, warmup=2)
        collected.append((run.losses, json.loads((tmp_path / name).read_text())))
    assert len(collected[0][0]) == 12
    assert (
        collected[0] == collected[1]
    )  # losses, parameters, and the running statistics, which a second forward pass would change again


def test_modules_in_bfloat16_converge_to_the_same_and_computing_them_again_changes_nothing(blocks_job, tmp_path):
    plain = blocks_job.run(Plan(), warmup=2)
    plan, collected = Plan(bfloat16_modules=("0", "2")), []
    for name, again in [("once", None), ("the-same", ("0", "2")), ("their-parts", ("0.0", "2.4")), ("what-holds-none", ("1",))]:
        spec = replace(blocks_job.spec, env={**blocks_job.spec.env, "STATE_TO": str(tmp_path / name)})
        both = plan.changed(recomputed_modules=again)
        run = replace(blocks_job, spec=spec).run(both, warmup=2)
        collected.append((run.losses, json.loads((tmp_path / name).read_text())))
    assert collected[0][0] != plain.losses  # it did compute in another precision
    verdict = compare([plain.losses], [collected[0][0]], tolerance_of(plan))
    assert verdict.verdict == "same", verdict.reason
    assert collected[1:] == collected[:1] * 3


def test_a_module_that_the_model_does_not_have_is_named(blocks_job):
    with pytest.raises(JobError, match=r"computes module '0\.7' again, and the model has none; beside it: 0\.0, 0\.1, 0\.2"):
        blocks_job.run(Plan(recomputed_modules=("0.7",)), warmup=2)


def test_the_modules_of_a_recorded_model_can_be_computed_again_at_a_price(blocks_job, tmp_path):
    trace = PYTORCH_DDP.record(blocks_job.spec, tmp_path / "trace", schedule=StepSchedule(warmup=2, untraced=4, traced=4))
    assert [module.name for module in trace.modules] == ["0", "1", "2"]
    assert all(module.refusal == "" and module.member for module in trace.modules)
    # Of a block: the results of its first layer, activation and dropout, the dropout's mask, mean and deviation of each feature;
    # not its own result, which the next block reads.
    assert {module.frees_bytes for module in trace.modules[:2]} == {4 * 16 * 64 * 4 + 2 * 64 * 4}
    prices = job_of(Trace.load(tmp_path / "trace"), PlanOptions(compute=frozenset({"recomputation"})))
    assert prices.predict(Plan(recomputed_modules=("0", "1"))).source == "extrapolated"
    graph = prices.job.measured.graph
    assert (graph.again_us > 0).all()
    assert (np.diff(graph.backward_from_us, axis=2) < 0).all()  # the last block's begins first
    with pytest.raises(InputError, match="the recorded model has no module '7'"):
        prices.predict(Plan(recomputed_modules=("7",)))
    both = PlanOptions(compute=frozenset({"precision", "recomputation"}), precision_table=BUNDLED_TORCH_TABLE)
    in_bfloat16 = job_of(trace, both).predict(Plan(bfloat16_modules=("0", "2"), recomputed_modules=("0",)))
    assert in_bfloat16.source == "extrapolated"
    assert in_bfloat16.peak_memory_bytes is None


def test_ddp_makes_exactly_the_groups_of_a_plan(torch_job, tmp_path):
    # In the order in which gradients become ready: from the last layer, bias after weight or before.
    sizes = [64 * 64 * 4, 64 * 4] * 4 + [64 * 10 * 4, 10 * 4]
    ready = _ready_order(torch_job, tmp_path)
    tensors = [TensorInfo(name=str(i), node="", dtype="float32", shape=(), size_bytes=sizes[i]) for i in ready]
    groups = tuple(tuple(str(i) for i in part) for part in (ready[:1], ready[1:6], ready[6:]))
    following = replace(
        torch_job,
        facts=JobFacts(framework="pytorch", tensors=tensors, ready_order=True),
        spec=replace(torch_job.spec, env={**torch_job.spec.env, "BUCKETS_TO": str(tmp_path / "buckets")}),
    )
    following.run(Plan(tensor_groups=groups), warmup=2)
    assert _buckets(tmp_path / "buckets") == [set(map(int, group)) for group in groups]


def _ready_order(torch_job, folder):
    """Of a run whose buckets hold one gradient each."""
    spec = replace(torch_job.spec, env={**torch_job.spec.env, "BUCKETS_TO": str(folder / "alone")})
    replace(torch_job, spec=spec).run(Plan.of(bucket_cap_bytes=1), warmup=2)
    return [index for bucket in _buckets(folder / "alone") for index in bucket]


def _buckets(path):
    return [{int(index) for index in bucket.split()} for bucket in path.read_text().split(",")]


def test_a_script_that_does_not_follow_is_told_what_to_use(torch_python):
    plain = job("pytorch-ddp", (torch_python, WORKLOADS.parents[1] / "tests" / "integration" / "ddp_job.py", "plain"), "pytorch")
    with pytest.raises(JobError, match=r"does not follow the plan: its script does not use ddp\.py \(planned_ddp in place of"):
        plain.run(Plan.of(bucket_cap_bytes=1000), warmup=2)
    with pytest.raises(JobError, match="does not follow the plan"):
        plain.probe(Plan.of(bucket_cap_bytes=1000))


def test_a_job_is_ended_when_its_script_has_used_the_plan(torch_python, tmp_path, monkeypatch):
    monkeypatch.setattr("dpro_search.deploy.jobs.PROBE_S", 600.0)
    script, over = tmp_path / "slow.py", tmp_path / "over"
    script.write_text(
        f"import pathlib, runpy, sys, time\nsys.path.insert(0, {str(TORCH_JOB.parent)!r})\n"
        f"runpy.run_path({str(TORCH_JOB)!r}, run_name='__main__')\ntime.sleep(120)\npathlib.Path({str(over)!r}).touch()\n"
    )
    job("pytorch-ddp", (torch_python, script), "pytorch").probe(Plan.of(bucket_cap_bytes=1000))
    assert not over.exists()


def test_a_plan_for_another_kind_of_job_is_refused_before_it_runs(torch_job):
    with pytest.raises(InputError, match="cycle_time_us: ddp, pytorch and synchronisation cannot express it"):
        torch_job.run(Plan.of(cycle_time_us=1.0), warmup=2)


@pytest.fixture(scope="module")
def kvstore_job(mxnet_python):
    command = (mxnet_python, WORKLOADS / "mxnet_train.py", "--model", "vgg16", "--batch", 1, "--steps", 8)
    return job("mxnet-kvstore", command, "mxnet", DMLC_NUM_SERVER="2")


@pytest.fixture(scope="module")
def kvstore_base(kvstore_job):
    return kvstore_job.run(Plan(), warmup=2)


def test_mxnet_pushes_compressed_gradients(kvstore_job):
    # Trainers push and pull in one call, which KVStore refuses for them.
    assert len(kvstore_job.run(Plan(compression="2bit"), warmup=2).times.iteration_us) >= 4


@pytest.mark.parametrize("plan", [Plan(servers=1), Plan.of(p3=True, slice_threshold=400_000)])
def test_mxnet_trains_the_same_with_other_servers_and_slices(kvstore_job, kvstore_base, plan):
    outcome = verdict(kvstore_job, plan, kvstore_base)
    assert outcome.compared == 8
    assert outcome.verdict == "same", outcome.reason


def test_a_plan_whose_run_hangs_is_ended_and_the_others_are_measured(mxnet_python):
    hangs = job("mxnet-kvstore", (mxnet_python, KVSTORE_JOB, "hangs-with-a-bound"), "mxnet", DMLC_NUM_SERVER="1")
    expected = Prediction(iteration_us=1e4, interval_us=(9e3, 1.1e4), breakdown_us={}, peak_memory_bytes=None, source="recorded")
    plans = [(Plan.of(bigarray_bound=1000), expected), (Plan(servers=2), expected)]
    validation = validate(hangs, expected, plans, warmup=2, timeout_s=15)
    (failed,) = validation.failed
    assert "took longer than 15 s" in failed.reason
    assert failed.reason.endswith("begun")
    assert [row.plan for row in validation.plans] == [Plan(servers=2)]


def test_mxnet_on_horovod_follows_its_knobs(mxnet_python):
    command = (
        mxnet_python,
        WORKLOADS / "mxnet_train.py",
        "--comm",
        "horovod",
        "--model",
        "vgg16",
        "--batch",
        1,
        "--steps",
        8,
    )
    plain = job("mxnet-horovod", command, "mxnet")
    base = plain.run(Plan(), warmup=2)
    outcome = verdict(plain, Plan.of(fusion_threshold_bytes=0, cycle_time_us=5000.0), base)
    assert outcome.verdict == "same", outcome.reason
    assert np.isfinite(base.times.iteration_us).all()


@pytest.mark.parametrize("plan", [Plan.of(servers=1, partition_bytes=512_000, credit=4), Plan(compression="fp16")])
def test_byteps_trains_the_same_with_other_servers_parts_and_credit_and_by_halves(byteps_python, plan):
    command = (byteps_python, WORKLOADS / "mxnet_train.py", "--comm", "byteps", "--model", "vgg16", "--batch", 1, "--steps", 8)
    plain = job("mxnet-byteps", command, "mxnet", DMLC_NUM_SERVER="2")
    outcome = verdict(plain, plan, plain.run(Plan(), warmup=2))
    assert outcome.compared == 8
    assert outcome.verdict == "same", outcome.reason
