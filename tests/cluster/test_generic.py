"""Servers of cards of which nothing else is known."""

import pytest

from dpro_search.cluster import bundled, parse_cluster, pcie_hosts, with_device
from dpro_search.errors import InputError


@pytest.mark.parametrize(("devices", "levels"), [(1, []), (4, ["pcie"]), (8, ["pcie", "socket"])])
def test_cards_are_joined_by_slots_and_sockets(devices, levels):
    host = pcie_hosts(bundled.device("a30"), devices=devices).groups[0].host
    assert [link.level for link in host.links] == levels
    assert host.devices == devices


def test_a_newer_slot_is_twice_as_fast():
    third, fifth = (pcie_hosts(bundled.device("l40"), generation=number).groups[0].host.links[0] for number in (3, 5))
    assert fifth.rate_bps == 4 * third.rate_bps


def test_hosts_multiply_ranks():
    assert pcie_hosts(bundled.device("a40"), devices=2, hosts=3).ranks == 6


def test_another_device_in_the_same_machine():
    changed_cluster = with_device(parse_cluster("2xmi300x-platform"), bundled.device("mi325x"))
    assert changed_cluster.groups[0].host.device.name == "AMD Instinct MI325X 256GB"
    assert changed_cluster.ranks == 16


def test_no_devices_are_one_line():
    with pytest.raises(InputError, match="must be at least 1, not 1 and 0"):
        pcie_hosts(bundled.device("a40"), devices=0)
