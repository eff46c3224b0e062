"""Changes of a job as text: names, units, suggestions."""

import math

import pytest

from dpro_search.errors import InputError
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, setting_names
from dpro_search.space.scenario import CLUSTER_SETTINGS, OP_SCALES, SCALES, ClusterChange, Scale, Scenario, readers
from tests.every_case import every_case

KNOWN = (*readers(), "groups", *CLUSTER_SETTINGS, *SCALES, *OP_SCALES)


def scenario(*texts: str) -> Scenario:
    return Scenario().changed(texts, known=KNOWN, job="a job")


def test_nothing_is_the_recorded_job() -> None:
    assert scenario() == Scenario()
    assert scenario("compute=0.9") != Scenario()


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("fusion_threshold_bytes=16MiB", Plan.of(fusion_threshold_bytes=2**24)),
        ("cycle_time_us=5ms", Plan.of(cycle_time_us=5000.0)),
        ("servers=3", Plan(servers=3)),
        ("p3=on", Plan.of(p3=True)),
        ("compression=2bit", Plan(compression="2bit")),
        ("bucket_cap_bytes=25MiB, first_bucket_bytes=1MB", Plan.of(bucket_cap_bytes=25 * 2**20, first_bucket_bytes=10**6)),
    ],
)
def test_fields_of_a_plan_are_read_with_the_unit_of_their_name(text: str, plan: Plan) -> None:
    assert scenario(text).plan == plan


def test_the_cluster_changes_in_parts() -> None:
    assert scenario("ranks=64", "rate=200gbit").cluster == ClusterChange(ranks=64, rate_bps=2e11)
    assert scenario("rate=unlimited").cluster.rate_bps == math.inf


def test_speeds_are_kept_in_order() -> None:
    scales = scenario("compute=0.9", "rank1.compute=0.5x").scales
    assert [(scale.what, scale.factor, scale.rank) for scale in scales] == [("compute", 0.9, None), ("compute", 0.5, 1)]


def test_sorts_of_ops_and_ranks_are_named() -> None:
    (kernels, usual, group) = scenario("kernels.gemm=0.5", "rank3=usual", "ranks2+0.communication=0.5").scales
    assert (kernels.what, kernels.only, kernels.factor) == ("kernels", "gemm", 0.5)
    assert (usual.what, usual.rank) == ("usual", 3)
    assert (group.what, group.group, group.factor) == ("communication", (0, 2), 0.5)


def test_a_later_change_of_one_field_wins() -> None:
    assert scenario("servers=2", "servers=4").plan.servers == 4


@every_case(
    ("text", "reason"),
    [
        ("bucket_cap_byte=1", "a job has no knob 'bucket_cap_byte'; did you mean bucket_cap_bytes?"),
        ("tensor_groups=1", "has no knob 'tensor_groups'"),
        ("servers", "'servers': no value; write servers=VALUE"),
        ("servers=many", "servers=many: 'many' is not a whole number"),
        ("servers=0", "servers=0: servers must be > 0"),
        ("compression=zip", "'zip' is none of fp16, bf16, 2bit"),
        ("bandwidth=0", "the factor must be above 0"),
        ("rank1.bandwidth=2", "write compute=0.9"),
        ("kernels=0.5", "write compute=0.9"),
    ],
)
def test_what_cannot_be_read_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        scenario(text)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_field_but_lists_of_lists_can_be_set() -> None:
    assert {*setting_names()} - {*readers()} == {"tensor_groups", "allreduce_algorithms", "op_clusters"}
    assert readers()["recomputed_modules"]("layers.0+layers.1") == ("layers.0", "layers.1")


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="ranks 0 to 1"):
        Scale.parse("rank7.compute=0.5").check_rank(2)


def test_a_named_cluster_takes_the_place_of_the_recorded_one_and_is_changed_further() -> None:
    recorded = ClusterSpec(cores=(0, 1), rate_bps=2e9)
    alone = Scenario().on("4xtestbed@1gbit").cluster.applied(recorded)
    assert (alone.ranks, alone.rate_bps) == (4, 1e9)
    fewer = Scenario().on("4xtestbed@1gbit").changed(["ranks=3", "rate=500mbit"], known=KNOWN, job="a job").cluster
    assert (fewer.applied(recorded).ranks, fewer.applied(recorded).rate_bps) == (3, 5e8)
    with pytest.raises(InputError, match="64 ranks do not fit"):
        Scenario().on("4xtestbed").changed(["ranks=64"], known=KNOWN, job="a job").cluster.applied(recorded)


def test_what_a_prediction_does_not_know_of_a_cluster_is_reported() -> None:
    assert any("not as on" in sentence for sentence in Scenario().on("2xhgx-h100").cluster.left_out)
