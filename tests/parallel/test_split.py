"""Where the time of a predicted step goes: the parts that are measured of paced ranks."""

import msgspec
import pytest

from dpro_search.collect.tables.parallel_times import BlockTime, CollectiveTime, ParallelTimes, UpdateTime
from dpro_search.kinds import job_of, load_source
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale, Scenario
from tests.parallel.jobs import prepared

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 16, "vocab_size": 64}
CONFIG["tie_word_embeddings"] = False  # a pipeline of PyTorch has no copies
HOSTS = """\
name = "2 hosts"
hosts = 2
devices = 2
[device]
name = "one CPU core"
vendor = "any"
kind = "cpu"
source = "this machine"
[nic]
count = 1
rate = "1gbit"
latency = "1us"
[loopback]
latency = "20us"
[source]
all = "this machine"
"""
MESSAGE_US, REDUCE_US = 70.0, 90.0  # recorded, of any size


def blocks(spread=0.0):
    """Layers of 100 and 200 us; the first and the last block take nothing."""
    rows = (("embedding", 0.0), ("layer", 100.0), ("head", 0.0))
    return tuple(
        BlockTime(block=name, tp=tp, micro_batch=1, sequence=16, forward_us=us, backward_us=2 * us, spread=spread)
        for name, us in rows
        for tp in (1, 2)
    )


def exchanges():
    """Between two ranks of one host and of two."""
    for hosts in (1, 2):
        for name, us in (("send_recv", MESSAGE_US), ("all_reduce", REDUCE_US)):
            yield CollectiveTime(
                collective=name, ranks_per_host=2 // hosts, hosts=hosts, world=4, rate_bps=1e9, size_bytes=1 << 20, us=us
            )


@pytest.fixture
def job(tmp_path):
    """Of four ranks on two hosts, eight sequences a step."""

    def made(runs="", **times):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIG))
        (tmp_path / "cluster.toml").write_text(HOSTS)
        exchange = {"blocks": blocks(), "collectives": tuple(exchanges()), **times}
        updates = (UpdateTime(elements=1.0, us=0.0),)
        ParallelTimes(memory_bytes_per_s=1e10, flops_per_s=5e10, updates=updates, **exchange).save(tmp_path / "times.json")
        lines = ['model = "config.json"', 'cluster = "cluster.toml"', "global_batch = 8", "sequence = 16", 'precision = "fp32"']
        lines += ['framework = "pytorch-gloo"', 'times = "times.json"', "[runs]", "micro_batch = 1", runs]
        (tmp_path / "job.toml").write_text("\n".join(lines))
        return job_of(load_source(tmp_path / "job.toml"))

    return made


PLANS = [
    Plan(),
    Plan.of(zero_stage=3),
    Plan.of(tp=2, sequence_parallel=False),
    Plan.of(pp=2),
    Plan.of(pp=2, schedule="gpipe"),
    Plan.of(pp=2, virtual_stages=2),
    Plan.of(tp=2, pp=2, sequence_parallel=False),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(dict(plan.settings)))
def test_the_parts_add_up_to_the_predicted_step(job, plan):
    opened_job, predicted = prepared(job()).split(plan), job().predict(plan)
    assert opened_job.step_us == pytest.approx(predicted.iteration_us)
    assert opened_job.compute + opened_job.bubble + opened_job.exposed_communication == pytest.approx(1.0)
    assert sum(opened_job.by_axis.values()) == pytest.approx(opened_job.exposed_communication)
    assert 0 <= opened_job.contention <= opened_job.exposed_communication
    assert min(opened_job.compute, opened_job.exposed_communication) > 0
    assert opened_job.bubble >= -1e-9


def test_the_bubble_of_free_exchanges_is_that_of_the_schedule(job):
    """It is (p - 1) / m of the time of m micro-batches, here of 4, on p ranks (Huang et al. 2019)."""
    free, _ = job().under(Scenario(scales=(Scale.parse("communication=0"),)))
    for schedule in ("gpipe", "1f1b"):
        shares = prepared(free).split(Plan.of(pp=2, schedule=schedule))
        computing_us = 4 * 2 * 300.0
        assert shares.bubble * shares.step_us == pytest.approx(computing_us / 4, rel=1e-3)
        assert shares.exposed_communication == pytest.approx(0.0, abs=1e-9)


def test_messages_are_exposed_on_the_ranks_that_receive_them(job):
    """Each rank of a pipeline of two receives four."""
    shares = prepared(job()).split(Plan.of(pp=2))
    assert shares.by_axis["pp"] * shares.step_us == pytest.approx(4 * MESSAGE_US)


def test_what_ranks_wait_for_the_slowest_of_them_is_exposed_and_not_compute(job):
    plan = Plan.of(tp=2, sequence_parallel=False)
    even, uneven = prepared(job()).split(plan), prepared(job(blocks=blocks(spread=0.1))).split(plan)
    assert uneven.compute * uneven.step_us == pytest.approx(even.compute * even.step_us)
    grown_us = uneven.exposed_communication * uneven.step_us - even.exposed_communication * even.step_us
    assert grown_us == pytest.approx(uneven.step_us - even.step_us)
    assert grown_us > 0


def test_what_a_rank_does_itself_to_hand_gradients_over_is_computation(job):
    handing = tuple(msgspec.structs.replace(row, reduce_us=50.0) for row in blocks())
    without, shares = prepared(job()).split(Plan()), prepared(job(blocks=handing)).split(Plan())
    assert shares.exposed_communication * shares.step_us == pytest.approx(without.exposed_communication * without.step_us)
    assert shares.compute * shares.step_us == pytest.approx(without.compute * without.step_us + 6 * 50.0)


def test_contention_is_what_ranks_of_a_host_cost_each_other_on_its_link(job):
    """Both ranks of a host send to the other one at a time: alone a message takes half as long, but for its latency."""
    shares = prepared(job()).split(Plan.of(pp=2))
    assert shares.contention * shares.step_us == pytest.approx(4 * MESSAGE_US / 2, rel=0.2)
    alone_us = prepared(job()).alone_us(Plan.of(pp=2))
    assert alone_us("recv", "pp", float(1 << 20)) == pytest.approx(MESSAGE_US / 2, rel=0.05)
    assert alone_us("all_reduce", "dp_replicate", float(1 << 20)) == pytest.approx(REDUCE_US)  # within a host
    assert alone_us("broadcast", "pp", 64.0) is None
