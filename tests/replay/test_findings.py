"""What is told of a job, and what is not worth telling."""

from dpro_search.graph.bus_bandwidth import GroupSpeed
from dpro_search.graph.device_time import Lateness, RankTime
from dpro_search.replay.findings import findings
from dpro_search.replay.sensitivity import ComputeScaled, Gain


def rank_time(rank: int = 0, *, compute: float, exposed: float = 0.0, waits: float = 0.0, host: float = 0.0) -> RankTime:
    idle = 1000 - compute - exposed - waits
    return RankTime(
        rank=rank,
        step_us=1000.0,
        compute_us=compute,
        exposed_communication_us=exposed,
        waiting_for_ranks_us=waits,
        idle_us=idle,
        host_bound_us=host,
        overlapped_pct=40.0 if exposed else None,
    )


def gain(gain_us: float) -> Gain:
    return Gain(change=ComputeScaled(factor=0.9), iteration_us=1000 - gain_us, gain_us=gain_us, gain_pct=gain_us / 10)


def test_the_costliest_comes_first_with_its_numbers():
    told = findings([rank_time(compute=300, exposed=250, host=440)], [], [], 1000.0)
    assert told[0].startswith("Host-bound: devices idle 44 % of a step (0.4 ms)")
    assert told[1].startswith("Communication that nothing hides takes 25 % of a step (40 % of the transfers are hidden)")
    assert len(told) == 2


def test_what_costs_less_than_three_per_cent_is_not_told():
    assert findings([rank_time(compute=795, exposed=20, waits=165, host=20)], [], [], 1000.0) == (
        "Ranks wait 16 % of a step for others to post a collective, rank 0 most (16 %); balance the work of the ranks.",
    )


def test_a_straggler_is_named_with_its_cost():
    late = [
        Lateness(rank=0, last_pct=10.0, cost_us=5.0, waited_us=90.0),
        Lateness(rank=3, last_pct=90.0, cost_us=100.0, waited_us=1.0),
    ]
    (sentence,) = findings([rank_time(compute=790, host=210)], late, [], 1000.0)[1:]
    assert sentence.startswith("Rank 3 comes last to 90 % of the collectives and costs the others 0.10 ms a step")


def test_the_best_change_is_told_and_one_that_gains_nothing_is_not():
    assert "gains most: 0.08 ms (8.0 %)" in findings([], [], [gain(10), gain(80)], 1000.0)[-1]
    assert findings([], [], [gain(0)], 1000.0) == ()


def test_a_slow_link_is_told_with_what_it_costs():
    speeds = [
        GroupSpeed(collective="allreduce", ranks=ranks, count=9, bytes_per_step=1e6, time_us=us, bus_bps=bps)
        for ranks, us, bps in (((0, 4), 200.0, 10e9), ((1, 5), 50.0, 40e9), ((2, 6), 50.0, 40e9))
    ]
    (sentence,) = findings([], [], [], 1000.0, speeds)
    assert sentence.startswith(
        "Slow link: allreduce among ranks 0, 4 reaches 10.0 Gbit/s a link, the other groups 40.0; it costs 0.15 ms"
    )
    assert findings([], [], [], 1000.0, speeds[1:]) == ()
