"""Where the time of a paced step went: exchanges of several ranks are matched, and the last post cuts what each was blocked."""

import json

import numpy as np
import pytest

from dpro_search.deploy.step_split import ComparedSplit, RankSpans, StepSplit, mean_split, measured_split, read_spans
from dpro_search.errors import JobError

KINDS = ("all_reduce", "send", "recv", "other")
REDUCE, SEND, RECV, OTHER = range(4)
STEP = 1000  # ns; steps begin at 0, 1000, ...


def rank(number, rows, *, groups, stages=1, steps=2, paced_us=0.0):
    """Steps of 1 us; rows are (group, kind, peer, posted, waited, done)."""
    columns = [(group, kind, peer, 64, *ns) for group, kind, peer, *ns in rows]
    return RankSpans(
        rank=number,
        stages=stages,
        groups=groups,
        kinds=KINDS,
        begins_ns=np.arange(steps) * STEP,
        paced_us=np.full(steps, paced_us),
        rows=np.array(columns, np.int64).reshape(-1, 7),
    )


def pair(axis, first, second, **options):
    """Two ranks in a group over an axis."""
    return [rank(number, rows, groups=[(axis, [0, 1])], **options) for number, rows in enumerate((first, second))]


def split(ranks, warmup=0, alone_us=None):
    return measured_split(ranks, warmup, lambda kind, axis, size_bytes: alone_us)


def test_the_last_post_of_a_collective_ends_waiting_and_begins_the_transfer():
    shares = split(pair("tp", [(0, REDUCE, -1, 100, 100, 500)], [(0, REDUCE, -1, 300, 300, 500)], paced_us=0.6))
    assert shares.by_exchange == pytest.approx({"tp all_reduce": 0.2, "tp waiting": 0.1})  # 200 ns on both, 200 on the first
    assert shares.exposed_communication == shares.by_axis["tp"] == pytest.approx(0.3)
    assert shares.compute == pytest.approx(0.7)
    assert shares.beyond_recorded == pytest.approx(0.1)
    assert shares.bubble == 0
    assert shares.step_us == 1.0


def test_contention_is_what_a_transfer_takes_longer_than_alone():
    ranks = pair("dp_shard", [(0, REDUCE, -1, 100, 100, 500)], [(0, REDUCE, -1, 300, 300, 500)])
    assert split(ranks, alone_us=0.15).contention == pytest.approx(0.05)
    assert split(ranks, alone_us=0.25).contention == pytest.approx(-0.05)
    assert split(ranks, alone_us=None).contention == 0


def test_a_transfer_that_is_hidden_has_no_more_contention_than_the_rank_was_blocked():
    ranks = pair("dp_shard", [(0, REDUCE, -1, 100, 480, 500)], [(0, REDUCE, -1, 100, 480, 500)])
    assert split(ranks, alone_us=0.1).contention == pytest.approx(0.02)


def test_waiting_for_another_stages_message_is_bubble():
    """The sender looks late for a message that had long been there."""
    shares = split(pair("pp", [(0, SEND, 1, 400, 900, 910)], [(0, RECV, 0, 100, 100, 600)], stages=2), alone_us=0.15)
    assert shares.bubble == pytest.approx(0.15)
    assert shares.by_exchange == pytest.approx({"pp send": 0.005, "pp recv": 0.1})
    assert shares.contention == pytest.approx(0.025)


def test_messages_of_both_directions_are_not_taken_for_each_other():
    first = [(0, SEND, 1, 100, 100, 300), (0, RECV, 1, 100, 300, 400)]
    second = [(0, RECV, 0, 200, 200, 300), (0, SEND, 0, 350, 350, 400)]
    shares = split(pair("pp", first, second, stages=2))
    assert shares.bubble == pytest.approx((100 + 50) / 2 / STEP)


@pytest.mark.parametrize(("stages", "part"), [(2, "bubble"), (1, "exposed_communication")])
def test_waiting_of_all_ranks_is_bubble_where_they_are_of_several_stages(stages, part):
    shares = split(pair("world", [(0, REDUCE, -1, 100, 100, 501)], [(0, REDUCE, -1, 500, 500, 501)], stages=stages))
    assert getattr(shares, part) == pytest.approx(0.2, abs=0.002)


def test_exchanges_are_matched_by_their_number_in_the_group():
    """Rank 1 is late by as much in each."""
    rows = [[(0, REDUCE, -1, at + late, at + late, at + 200) for at in (100, 400)] for late in (0, 50)]
    assert split(pair("tp", *rows)).by_exchange["tp waiting"] == pytest.approx(0.05)


def test_replicas_over_two_axes_are_one_axis():
    groups = [("dp_shard", [0, 1]), ("dp_replicate", [0, 1])]
    rows = [(0, REDUCE, -1, 100, 100, 200), (1, REDUCE, -1, 300, 300, 400)]
    shares = split([rank(number, rows, groups=groups) for number in range(2)])
    assert shares.by_axis == pytest.approx({"dp": 0.2})


def test_a_wait_whose_call_was_not_seen_is_exposed_communication():
    shares = split(pair("tp", [(-1, OTHER, -1, 100, 100, 200)], [(-1, OTHER, -1, 300, 300, 400)]))
    assert shares.by_axis == pytest.approx({"other": 0.1})


def test_the_warm_up_counts_nowhere_and_too_few_steps_have_no_split():
    rows = [(0, REDUCE, -1, 100, 100, 900)], [(0, REDUCE, -1, 100, 100, 900)]
    assert split(pair("tp", *rows, steps=3), warmup=1).compute == 1.0
    assert split(pair("tp", *rows, steps=3), warmup=2) is None
    assert split([]) is None


def test_runs_of_one_plan_have_the_mean_of_their_shares():
    shares = ((0.2, "tp"), (0.4, "dp"))
    one, other = (
        StepSplit(step_us=1.0, compute=1 - share, bubble=0.0, exposed_communication=share, contention=0.0, by_axis={axis: share})
        for share, axis in shares
    )
    assert mean_split([one, other]).by_axis == pytest.approx({"tp": 0.1, "dp": 0.2})
    mean_shares = ComparedSplit.mean([None, ComparedSplit.of(one, one), ComparedSplit.of(other, one)])
    assert mean_shares.points["exposed_communication"] == pytest.approx(-10.0)
    assert ComparedSplit.mean([None]) is None


def test_what_ranks_wrote_is_read_by_rank_and_damage_is_told(tmp_path):
    head = {"rank": 0, "stages": 1, "groups": [["tp", [0, 1]]], "kinds": KINDS, "steps": [[0, 0.5], [1000, 0.0]]}
    row = np.array([0, REDUCE, -1, 64, 100, 100, 200])
    for number in (1, 0):
        (tmp_path / f"spans-{number:05d}").write_bytes(json.dumps(head | {"rank": number}).encode() + b"\n" + row.tobytes())
    spans = read_spans(tmp_path)
    assert [each.rank for each in spans] == [0, 1]
    assert split(spans).by_axis == pytest.approx({"tp": 0.1})
    (tmp_path / "spans-00000").write_bytes(b"{}\n")
    with pytest.raises(JobError, match="spans-00000: what a rank wrote of its exchanges is damaged"):
        read_spans(tmp_path)
