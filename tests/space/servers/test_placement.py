"""Where servers run: hosts of their own or the workers', and in which order these take them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.launch.parameter_servers import ServerSpec
from dpro_search.errors import InputError
from dpro_search.space.servers.placement import hosts_of_workers, on_workers, own_hosts, process_hosts

COUNTS = st.integers(1, 9)


def test_workers_have_the_first_hosts_and_servers_by_default_the_next_ones():
    assert process_hosts(2, 3, ()).tolist() == [0, 1, 2, 3, 4]
    assert process_hosts(2, 3, (1, 0, 0)).tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("server_host", [(0,), (0, 1, 2), (0, -1)])
def test_every_server_needs_a_host(server_host):
    with pytest.raises(InputError, match="needs a host for each"):
        process_hosts(2, 2, server_host)


@given(workers=COUNTS, servers=COUNTS)
def test_the_workers_hosts_take_servers_in_turn_as_the_launcher_starts_them(workers, servers):
    placed = hosts_of_workers(workers, servers)
    assert Counter(placed) == Counter(ServerSpec(count=servers, on_workers=True).hosts(workers))
    assert list(placed) == sorted(placed, reverse=True), "the store numbers them by address, the last one first"
    assert on_workers(workers, placed)
    assert not on_workers(workers, own_hosts(workers, servers))
    assert not on_workers(workers, ())
