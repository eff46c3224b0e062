"""What today's predictors take of a cluster, and what they leave out."""

import msgspec
import pytest

from dpro_search.cluster import Cluster, Link, parse_cluster
from dpro_search.errors import InputError
from dpro_search.space.cluster import ClusterSpec, spec_on


def _mixed() -> Cluster:
    fast, slow = (parse_cluster(name) for name in ("2xhgx-h100", "dgx-a100-80"))
    return msgspec.structs.replace(fast, name="mixed", groups=(*fast.groups, *slow.groups))


def test_ranks_are_the_first_devices_each_with_a_core_of_its_own():
    spec = spec_on(parse_cluster("4xhgx-h100"), 16).spec
    assert spec == ClusterSpec(cores=tuple(range(16)), rate_bps=3.2e12, ranks_per_host=8)


def test_ranks_that_do_not_fill_their_last_host_have_no_common_number():
    assert spec_on(parse_cluster("2xhgx-h100"), 12).spec.ranks_per_host is None


def test_on_one_host_no_link_limits_and_that_is_reported():
    spec = spec_on(parse_cluster("hgx-h100"))
    assert spec.spec.rate_bps is None
    assert "links inside a host (nvlink) do not limit the ranks that share it" in spec.left_out


def test_nothing_is_left_out_of_the_testbed():
    assert spec_on(parse_cluster("8xtestbed@1gbit")).left_out == ()


def test_hosts_that_differ_are_as_slow_as_the_slowest_and_that_is_reported():
    spec = spec_on(_mixed())
    assert spec.spec.rate_bps == 1.6e12
    assert spec.left_out[0] == "hosts have NICs of several rates: the slowest is taken for all"
    assert spec.left_out[1].startswith("hosts have several kinds of devices (NVIDIA A100 SXM4 80GB, NVIDIA H100 SXM5 80GB)")


def test_hosts_beyond_the_ranks_do_not_matter():
    assert spec_on(_mixed(), 16).spec.rate_bps == 3.2e12


def test_oversubscribed_switches_divide_the_rate():
    thin = (Link(level="leaf", hosts=1), Link(level="spine", hosts=None, oversubscription=2.0))
    spec = spec_on(msgspec.structs.replace(parse_cluster("4xhgx-h100"), links=thin))
    assert spec.spec.rate_bps == 1.6e12
    assert spec.left_out[-1].startswith("spine switches are oversubscribed 2 to 1")


def test_hosts_of_a_rack_have_the_rate_of_their_nvlinks():
    assert spec_on(parse_cluster("gb200-nvl72")).spec.rate_bps == 4 * 7.2e12


@pytest.mark.parametrize("ranks", [0, 17])
def test_more_ranks_than_devices_are_refused(ranks: int):
    with pytest.raises(InputError, match="do not fit on 2 x HGX H100: it has 16 devices"):
        spec_on(parse_cluster("2xhgx-h100"), ranks)
