"""What is said of an imported trace, and what is not worth saying."""

import msgspec
import pytest

from dpro_search.graph.recorded_collectives import GroupSpeed
from dpro_search.kinds.recorded.findings import findings
from dpro_search.kinds.recorded.questions import Answer
from dpro_search.replay.device_time import RankTime


def rank_time(*, compute: float, exposed: float = 0.0, waits: float = 0.0, host: float = 0.0) -> RankTime:
    return RankTime(
        rank=0,
        compute_us=compute,
        exposed_communication_us=exposed,
        waiting_for_ranks_us=waits,
        unknown_us=0.0,
        idle_us=1000 - compute - exposed - waits,
        host_bound_us=host,
        transfer_us=2 * exposed,
    )


def answer(what_if: str, topic: str, gain_us: float, ranks: tuple[int, ...] = ()) -> Answer:
    return Answer(
        what_if=what_if, topic=topic, ranks=ranks, meaning="that", predicted_iteration_us=1000 - gain_us,
        predicted_mean_us=1000 - gain_us, gain_us=gain_us, gain_pct=gain_us / 10, certain=True,
    )  # fmt: skip


def test_the_largest_gain_comes_first_with_its_numbers_and_the_question_that_repeats_it():
    times = [rank_time(compute=300, exposed=250, host=440)]
    answers = [answer("communication=0", "communication", 240.0), answer("launch=0", "launch", 400.0)]
    first, second = findings(times, answers, 1000.0)
    assert first.startswith("Host-bound: devices are idle for 44 % of an iteration")
    assert first.endswith("With that: 600.0 us an iteration, 400.0 us (40.0 %) less (--what-if launch=0).")
    assert second.startswith("Communication that nothing hides takes 25 % of an iteration (50 % of the transfers are hidden)")


@pytest.mark.parametrize(
    ("collective", "asked", "advice"),
    [
        ("all_reduce", (), "DDP's bucket_cap_mb"),
        ("all_gather", (), "FSDP's reshard_after_forward"),
        ("all_reduce", ("all_reduce", "all_to_all"), "TorchRec's train pipelines"),
        ("", (), "try to overlap it with computation"),
    ],
)
def test_the_advice_is_about_the_type_of_collective_that_would_gain_most(collective, asked, advice):
    answers = [answer("communication=0", "communication", 240.0)]
    answers += [answer(f"collectives.{name}=0", "collectives", 100.0 + number) for number, name in enumerate(asked)]
    (sentence,) = findings([rank_time(compute=300, exposed=250)], answers, 1000.0, (), collective)
    assert advice in sentence


def test_what_the_replay_does_not_confirm_is_not_said():
    times = [rank_time(compute=100, exposed=500, waits=300)]
    assert findings(times, [answer("communication=0", "communication", 0.0)], 1000.0) == ()
    assert findings(times, [], 1000.0) == ()


def test_what_gains_less_than_three_per_cent_is_not_said():
    assert findings([rank_time(compute=900)], [answer("launch=0", "launch", 29.0)], 1000.0) == ()


def test_of_several_ranks_or_kernels_the_one_that_gains_most_is_named():
    answers = [answer("rank3=usual", "rank", 100.0, (3,)), answer("rank1=usual", "rank", 50.0, (1,))]
    (sentence,) = findings([rank_time(compute=790, waits=150)], answers, 1000.0)
    assert sentence.startswith("Rank 3 takes longer than the others; ranks wait 15 % of an iteration for each other.")


def test_a_slow_link_is_named_with_what_it_reaches():
    speeds = [
        GroupSpeed(collective="allreduce", ranks=ranks, count=9, bytes_per_step=1e6, time_us=us, bus_bps=bps)
        for ranks, us, bps in (((0, 4), 200.0, 10e9), ((1, 5), 50.0, 40e9), ((2, 6), 50.0, 40e9))
    ]
    (sentence,) = findings([], [answer("ranks0+4.communication=0.25", "link", 150.0, (0, 4))], 1000.0, speeds)
    assert sentence.startswith("Slow link: allreduce among ranks 0, 4 reaches 10.0 Gbit/s a link, the other groups 40.0.")


def test_uneven_stages_are_the_finding_of_a_pipeline_not_the_sharding_of_a_model():
    times = [replace_rank(rank_time(compute=us, exposed=100), rank) for rank, us in enumerate((400, 400, 400, 800))]
    answers = [answer("stages=even", "stages", 150.0, (3,)), answer("communication=0", "communication", 50.0)]
    first, second = findings(times, answers, 1000.0, (), "reduce_scatter", pipeline=True)
    assert first.startswith(
        "The stages of the pipeline are uneven: of an iteration, ranks 3 compute for 800.0 us and the others for 400.0 us"
    )
    assert "(--what-if stages=even)" in first
    assert "FSDP" not in second
    assert "--overlap-grad-reduce" in second


def test_advice_for_a_program_that_xla_compiled_names_nothing_of_pytorch():
    answers = [
        answer("launch=0", "launch", 400.0),
        answer("kernels.gemm=0.5", "kernels", 300.0),
        answer("loading=0", "loading", 200.0),
    ]
    sentences = findings([rank_time(compute=300, host=440)], answers, 1000.0, framework="xla")
    assert len(sentences) == 3
    assert not any(word in sentence for sentence in sentences for word in ("CUDA graphs", "torch", "DataLoader"))
    assert "jax.lax.scan" in sentences[0]


def replace_rank(time: RankTime, rank: int) -> RankTime:
    return msgspec.structs.replace(time, rank=rank)
