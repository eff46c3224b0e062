"""Jobs on GPUs are timed by one process on a GPU: what is started, what is recorded, and what is refused or warned of."""

import pytest

from dpro_search.collect.tables.parallel_times import ParallelTimes
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.kinds import load_source
from dpro_search.parallel import KIND, other_device
from dpro_search.parallel.timed import recording
from dpro_search.parallel.timed.real import on_one_gpu
from dpro_search.space.plan import Plan
from tests.parallel import jobs
from tests.parallel.jobs import prepared

H100 = "NVIDIA H100 80GB HBM3"
LAYERS = 32  # of Llama-3-8B
COMMAND = ("python3", "train.py")


def written(layer_us, device=H100, steps=5):
    """What a process on a GPU writes of three micro-batches a step: forward and backward passes, the latter twice as long."""
    us = {0: 10.0, LAYERS + 1: 50.0}
    passes = [
        [block, forward, us.get(block, layer_us) * (1 if forward else 2)]
        for _ in range(3)
        for forward, blocks in ((True, range(LAYERS + 2)), (False, range(LAYERS + 1, -1, -1)))
        for block in blocks
    ]
    step = {"passes": passes, "step_us": 9e4, "rest_us": 2e3, "finite": True}
    facts = {"device": device, "torch": "2.11", "peak_bytes": 5 * 2**30, "flops_per_s": 7e14, "memory_bytes_per_s": 3e12}
    return [{"steps": [step] * steps, "elements": 4e9, "split_forward_us": 100.0, "split_backward_us": 200.0, **facts}]


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Records plans of a job from what a process wrote; and its job afterwards."""

    def made(content, *plans, **values):
        monkeypatch.setattr(recording, "_timed", lambda *_: content)
        job = jobs.job(tmp_path, "tp = 1", framework="pytorch-2", global_batch=96, **values)
        real = on_one_gpu(KIND.facts(prepared(job).description), KIND.targets, COMMAND, lambda _: H100)
        out = tmp_path / "times.json"
        exchange = recording.record_times(prepared(job), real, plans, out, exchanges=False)
        return exchange, jobs.job(tmp_path, "tp = 1", framework="pytorch-2", global_batch=96, times="times.json", **values)

    return made


def test_one_process_is_started_however_many_gpus_the_job_has(tmp_path):
    job = jobs.job(tmp_path, framework="pytorch-2")
    launch = on_one_gpu(KIND.facts(prepared(job).description), KIND.targets, COMMAND, lambda _: H100)
    assert (launch.spec.ranks, launch.spec.cores, launch.shaped) == (1, (), False)
    assert [target.name for target in launch.targets] == ["pytorch"]


def test_without_a_gpu_or_a_command_nothing_is_started(tmp_path):
    facts = KIND.facts(prepared(jobs.job(tmp_path)).description)
    with pytest.raises(MissingCapabilityError, match="sees no GPU here") as caught:
        on_one_gpu(facts, KIND.targets, COMMAND, lambda _: None)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="--command"):
        on_one_gpu(facts, KIND.targets, (), lambda _: H100)


def test_recorded_blocks_are_the_jobs_and_exchanges_stay_modelled(timed):
    timing, job = timed(written(1000.0), Plan.of(tp=2))
    assert [(row.block, row.forward_us, row.backward_us) for row in timing.blocks] == [
        ("embedding", 10.0, 20.0),
        ("layer", 1000.0, 2000.0),
        ("head", 50.0, 100.0),
    ]
    work_of_layer = prepared(job).rank_work(Plan.of(tp=2))["layer"]
    assert (work_of_layer.forward_us, work_of_layer.backward_us) == (1000.0, 2000.0)
    assert timing.collectives == ()
    assert job.replayed(Plan.of(tp=2)).breakdown_us["exposed_tensor_parallel"] > 0
    assert prepared(job).description.warnings == ()


def test_a_step_is_recorded_with_its_plan_and_the_memory_of_the_rank(timed):
    timing, _ = timed(written(1000.0), Plan.of(zero_stage=2, tp=2))
    (step,) = timing.steps
    assert step.settings.items() >= {"tp": 2, "dp": 8, "zero_stage": 2, "micro_batch": 1, "sequence_parallel": True}.items()
    assert (step.step_us, step.update_us, step.peak_bytes, step.micro_batches) == (9e4, 2e3, 5 * 2**30, 3)
    assert (timing.device, timing.flops_per_s) == (H100, 7e14)


def test_a_plan_with_recomputation_is_timed_with_it_and_blocks_are_kept_without(timed):
    timing, job = timed(written(1000.0), Plan.of(recompute="full"))
    layer = timing.blocks[1]
    assert (layer.forward_us, layer.backward_us) == (1000.0, 1000.0)
    assert timing.steps[0].blocks[1].backward_us == 2000.0
    assert prepared(job).rank_work(Plan.of(recompute="full"))["layer"].backward_us == 2000.0


def test_blocks_timed_without_recomputation_stay_when_it_is_timed_too(timed):
    timed(written(1000.0), Plan())
    timing, _ = timed(written(1100.0), Plan.of(recompute="full"))
    assert [row.forward_us for row in timing.blocks] == [10.0, 1000.0, 50.0]
    assert len(timing.steps) == 2


def test_a_plan_that_was_timed_is_not_timed_again(timed):
    first, _ = timed(written(1000.0), Plan())
    assert timed(None, Plan())[0] == first


def test_a_stage_of_a_pipeline_is_timed_with_all_layers(timed):
    timing, _ = timed(written(1000.0), Plan.of(pp=2, virtual_stages=2))
    assert "pp" not in timing.steps[0].settings


def test_times_of_two_kinds_of_gpus_do_not_mix(timed):
    timed(written(1000.0), Plan())
    with pytest.raises(InputError, match="its times are those of NVIDIA H100 80GB HBM3"):
        timed(written(1000.0, device="NVIDIA A100-SXM4-80GB"), Plan.of(tp=2))


def test_a_gpu_is_known_by_its_drivers_name_and_another_is_warned_of(tmp_path):
    job = jobs.job(tmp_path)
    assert other_device(prepared(job).description.device, H100) is None
    assert "NVIDIA L40S, and the job's cluster has NVIDIA H100 SXM5 80GB" in other_device(
        prepared(job).description.device, "NVIDIA L40S"
    )
    ParallelTimes(device="NVIDIA L40S", precision="bf16").save(tmp_path / "times.json")
    (tmp_path / "job.toml").write_text(jobs.text(times="times.json"))
    assert any("NVIDIA L40S" in warning for warning in load_source(tmp_path / "job.toml").warnings)


def test_a_block_that_waits_for_the_host_is_not_shorter_where_it_is_split(timed):
    """128 tokens: kernels of a layer take less than it takes to start them."""
    content = [{**run, "split_forward_us": 0.0} for run in written(1000.0)]
    _, job = timed(content, Plan(), sequence=128)
    assert prepared(job).rank_work(Plan.of(tp=8))["layer"].forward_us >= 1000.0
