"""Described jobs as they run on this machine: hosts, cores, and what is refused."""

import msgspec
import pytest

from dpro_search.collect.tables.parallel_times import BlockTime, ParallelTimes
from dpro_search.errors import InputError
from dpro_search.kinds import described_job, job_of, load_source
from dpro_search.space.plan import Plan

COMMAND = ("python3", "train.py")
CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 64}
TIMES = ParallelTimes(
    memory_bytes_per_s=1e10,
    flops_per_s=5e10,
    blocks=tuple(
        BlockTime(block=name, micro_batch=1, sequence=16, forward_us=forward_us, backward_us=2 * forward_us, reduce_us=3.0)
        for name, forward_us in (("embedding", 10.0), ("layer", 100.0), ("head", 40.0))
    ),
)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def real(tmp_path):
    """The job of a cluster, and as it runs here."""

    def made(cluster, *, paced=False, times=TIMES, **values):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIG))
        if times is not None:
            times.save(tmp_path / "times.json")
            values["times"] = "times.json"
        rows = {"model": "config.json", "cluster": cluster, "global_batch": 8, "sequence": 16, "precision": "fp32", **values}
        lines = [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in rows.items()]
        (tmp_path / "job.toml").write_text("\n".join([*lines, 'framework = "pytorch-gloo"', "[runs]", "micro_batch = 1"]))
        source = load_source(tmp_path / "job.toml")
        job = job_of(source)
        return job, described_job(source, job, tmp_path, COMMAND, paced=paced)

    return made


def test_each_rank_has_a_host_and_a_link_of_the_clusters_rate(real):
    _, real_job = real("2xtestbed@500mbit")
    assert (real_job.spec.ranks, real_job.spec.hosts, real_job.spec.cores) == (2, 2, (0, 1))
    assert (real_job.rate_bps, real_job.shaped) == (5e8, True)
    assert [target.name for target in real_job.targets] == ["pytorch"]


def test_ranks_share_cores_only_where_predictions_know_it(real):
    with pytest.raises(InputError, match="write 'cores = 2' into the job's file"):
        real("4xtestbed@1gbit")
    assert real("4xtestbed@1gbit", cores=2)[1].spec.cores == (0, 1, 0, 1)


def test_more_ranks_than_cores_carry_are_paced_or_refused(real):
    with pytest.raises(InputError, match="8 ranks cannot run on 2 cores: at most 4; --paced runs up to 16"):
        real("8xtestbed@1gbit", cores=2)
    assert real("8xtestbed@1gbit", paced=True)[1].spec.cores == ()
    with pytest.raises(InputError, match="17 ranks cannot run on 2 cores: at most 16"):
        real("17xtestbed@1gbit", paced=True, global_batch=17)


def test_paced_ranks_need_recorded_times_and_share_no_cores(real):
    with pytest.raises(InputError, match="--paced needs recorded times"):
        real("4xtestbed@1gbit", paced=True, times=None)
    with pytest.raises(InputError, match="leave 'cores' out"):
        real("4xtestbed@1gbit", paced=True, cores=2)


def test_paced_ranks_wait_for_what_is_predicted_of_their_own_work(real):
    _, real_job = real("4xtestbed@1gbit", paced=True)
    times = msgspec.json.decode(real_job.paced.times(Plan()))
    assert times["embedding"] == [10.0, 20.0, 3.0, 0.0]
    assert times["layers"] == [[100.0, 200.0, 3.0, 0.0]] * 2
    halved = msgspec.json.decode(real_job.paced.times(Plan.of(tp=2)))
    assert 0 < halved["layers"][0][0] < 100.0


def test_a_prediction_adds_up_recorded_times(real):
    """One rank of two that exchange for free: two micro-batches of four sequences each would be 8 / 2 of one."""
    job, _ = real("2xtestbed")
    recorded_us = 4 * 3 * (10.0 + 2 * 100.0 + 40.0) + 4 * 3.0
    predicted = job.replayed(Plan())
    exposed = sum(us for name, us in predicted.breakdown_us.items() if "exposed" in name)
    assert predicted.iteration_us == pytest.approx(recorded_us + exposed + predicted.breakdown_us["optimizer"], rel=1e-3)


def test_a_shared_product_has_what_the_framework_adds_to_it(real):
    """Predicted from whole blocks: four products of a layer, each with half of its flops and the framework's own work."""

    def layer_us(split_us):
        _, real_job = real("4xtestbed@1gbit", paced=True, times=msgspec.structs.replace(TIMES, split_forward_us=split_us))
        return msgspec.json.decode(real_job.paced.times(Plan.of(tp=2)))["layers"][0][0]

    none_us, some_us, more_us = (layer_us(split_us) for split_us in (0.0, 1.0, 2.0))
    assert 0 < none_us < some_us
    assert more_us - some_us == pytest.approx(some_us - none_us)


def test_tensor_parallel_ranks_wait_for_the_slowest_of_them_and_data_parallel_ones_once_in_a_step(real):
    """The expected largest of two standard normal values is 0.59 (Blom), so that a spread of a tenth costs 5.9 %."""
    uneven = tuple(msgspec.structs.replace(row, spread=0.1) for row in TIMES.blocks)
    collected = []
    for blocks in (TIMES.blocks, uneven):
        job, _ = real("2xtestbed", times=msgspec.structs.replace(TIMES, blocks=blocks))
        collected.append([job.replayed(plan).breakdown_us["compute"] for plan in (Plan.of(tp=2, sequence_parallel=False), Plan())])
    assert collected[1][0] == pytest.approx(1.0589 * collected[0][0], rel=1e-3)
    assert collected[1][1] == collected[0][1]


def test_times_of_another_precision_are_refused(real):
    with pytest.raises(InputError, match="was recorded in bf16, and the job runs in fp32"):
        real("2xtestbed", times=msgspec.structs.replace(TIMES, precision="bf16"))
