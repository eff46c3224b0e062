"""Hosts behind limited links: real namespaces, real traffic, nothing left behind."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dpro_search.collect.launch.netns import ShapedHosts, remove_leftovers
from dpro_search.quantities import parse_rate_bps

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="shaped hosts need root, ip and tc"),
]

SEND = """
import socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server(("0.0.0.0", 5000)); print("ready", flush=True); peer, _ = server.accept()
    count = 0
    while data := peer.recv(1 << 16): count += len(data)
else:
    peer = socket.create_connection((sys.argv[2], 5000)); start = time.monotonic()
    peer.sendall(b"x" * int(sys.argv[3])); peer.shutdown(socket.SHUT_WR); peer.recv(1)
    print(time.monotonic() - start)
"""


def left_behind(pid: int | None = None) -> list[str]:
    """Namespaces and links that a process made (this one if None); other jobs on the machine have their own."""
    listing = subprocess.run("ip netns list; ip -o link", shell=True, capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\bdps{pid or os.getpid()}[hbv]\d*", listing)


def transfer_s(hosts: ShapedHosts, size: int) -> float:
    serving = subprocess.Popen(hosts.command(1, [sys.executable, "-c", SEND, "serve"]), stdout=subprocess.PIPE, text=True)
    assert serving.stdout.readline() == "ready\n"
    sending = hosts.command(0, [sys.executable, "-c", SEND, "send", hosts.address(1), str(size)])
    seconds = float(subprocess.run(sending, capture_output=True, text=True, check=True).stdout)
    serving.wait(timeout=10)
    return seconds


def test_bytes_cross_the_link_at_its_rate_and_the_rate_can_change():
    with ShapedHosts(2, parse_rate_bps("100mbit")) as hosts:
        before = hosts.sent_bytes(0)
        slow = transfer_s(hosts, 6_000_000)
        assert hosts.sent_bytes(0) - before >= 6_000_000
        hosts.set_rate(parse_rate_bps("400mbit"))
        fast = transfer_s(hosts, 6_000_000)
    assert slow > 0.4  # 48 Mbit at 100 Mbit/s
    assert fast < slow / 2
    assert not left_behind()


JOB = """
import sys, threading
from pathlib import Path
from dpro_search.collect.launch.horovod_gloo import run_horovod_gloo
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec
out = Path(sys.argv[2])
with ShapedHosts(2) as hosts:
    run_horovod_gloo(JobSpec(command=(sys.argv[1], str(out / "sleeper.py"))), out, hosts=hosts)
"""


WHICH = """
import socket, sys
if sys.argv[1] == "serve":
    server = socket.create_server(("0.0.0.0", 5000)); print("ready", flush=True); peer, _ = server.accept()
else:
    peer = socket.create_connection((sys.argv[2], 5000))
print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\\0")[0].decode())
"""


def test_both_ends_of_a_connection_use_linux_own_congestion_control_whatever_the_machine_does():
    with ShapedHosts(2) as hosts:
        serving = subprocess.Popen(hosts.command(1, [sys.executable, "-c", WHICH, "serve"]), stdout=subprocess.PIPE, text=True)
        assert serving.stdout.readline() == "ready\n"
        asking = hosts.command(0, [sys.executable, "-c", WHICH, "ask", hosts.address(1)])
        assert subprocess.run(asking, capture_output=True, text=True, check=True).stdout == "cubic\n"
        assert serving.communicate(timeout=10)[0] == "cubic\n"


def test_ranks_die_with_the_process_that_started_them(tensorflow_python, tmp_path):
    (tmp_path / "sleeper.py").write_text(f"import time\nprint('up', flush=True)\ntime.sleep(600)  # {tmp_path}\n")
    process = subprocess.Popen([sys.executable, "-c", JOB, tensorflow_python, str(tmp_path)])
    logs = [tmp_path / f"rank{rank}" / "log" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(log.exists() and "up" in log.read_text() for log in logs) and time.monotonic() < deadline:
        time.sleep(0.1)
    running = subprocess.run(["pgrep", "-f", f"{tmp_path}/sleeper.py"], capture_output=True, text=True, check=False)
    assert len(running.stdout.split()) >= 2
    process.kill()
    process.wait(timeout=20)
    while subprocess.run(["pgrep", "-f", f"^[^ ]*python {tmp_path}/sleeper.py"], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < deadline + 20
        time.sleep(0.1)
    remove_leftovers()
    assert not left_behind(process.pid)


def test_every_host_has_its_name_and_knows_the_others():
    with ShapedHosts(3) as hosts:
        done = subprocess.run(
            hosts.command(2, ["sh", "-c", "hostname; cat /etc/hosts"]), capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[0] == "h2"
        assert f"{hosts.address(0)} h0" in done.stdout


HOLD = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from dpro_search.collect.launch.netns import ShapedHosts
with ShapedHosts(2):
    print("up", flush=True)
    time.sleep(60)
"""


def holding() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_hosts_are_removed_when_their_process_is_ended(number):
    process = holding()
    process.send_signal(number)
    process.wait(timeout=20)
    assert not left_behind(process.pid)


def test_what_a_killed_process_left_is_removed_by_the_next():
    process = holding()
    process.kill()
    process.wait(timeout=20)
    assert left_behind(process.pid)
    deadline = time.monotonic() + 20
    while left_behind(process.pid) and time.monotonic() < deadline:
        remove_leftovers()
    assert not left_behind(process.pid)
