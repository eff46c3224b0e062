"""The testbed is what `collect --hosts N --rate R` makes: shaped in both directions, a rank and a core a host."""

import os
import re
import shutil
import subprocess

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import default_cores
from dpro_search.space.cluster import ClusterSpec, spec_on


def test_a_rank_and_a_core_on_each_host():
    testbed = parse_cluster("4xtestbed@1gbit")
    assert (testbed.hosts, testbed.ranks, testbed.ranks_per_host) == (4, 4, 1)
    assert {device.kind for device in testbed.devices} == {"cpu"}


def test_predictors_see_a_job_that_was_started_there():
    cores = default_cores(2)
    if len(set(cores)) < 2:
        pytest.skip("ranks share a core here")
    assert spec_on(parse_cluster("2xtestbed@2gbit")) == (ClusterSpec(cores=(0, 1), rate_bps=2e9, ranks_per_host=1), ())


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc")
def test_both_ends_of_each_link_are_shaped_to_its_rate():
    testbed = parse_cluster("2xtestbed@300mbit")
    assert testbed.groups[0].host.nics.link.duplex == "full"
    with ShapedHosts(testbed.hosts, testbed.rate_bps) as hosts:
        inside = [
            subprocess.run(hosts.command(i, ["tc", "qdisc", "show", "dev", "eth0"]), capture_output=True, text=True) for i in (0, 1)
        ]
        outside = subprocess.run(["tc", "qdisc", "show"], capture_output=True, text=True, check=True).stdout
        ends = [*(done.stdout for done in inside), *re.findall(rf"^.*dev dps{os.getpid()}v\d .*$", outside, re.MULTILINE)]
    assert len(ends) == 2 * testbed.hosts
    assert all("tbf" in end and "rate 300Mbit" in end for end in ends)
