"""The port at which a job's processes meet is none that one of them gets from the system."""

import socket
from pathlib import Path

from dpro_search.collect.launch.ranks import free_port


def test_a_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0


def test_a_port_is_none_that_the_system_hands_out() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(first <= free_port() <= last for _ in range(200))
