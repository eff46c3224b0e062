"""Starting servers beside workers: how many there are, on which hosts, and what of it a job is told."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dpro_search.collect.launch.parameter_servers import (
    ServerSpec,
    byteps_servers,
    hosts_needed,
    on_workers_of,
    run_with_servers,
    server_hosts,
    servers_of,
)
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.errors import InputError

TELL = "import os; print(*(os.environ[name] for name in ('HOST', 'DMLC_ROLE', 'DMLC_NODE_HOST', 'DMLC_PS_ROOT_URI')), flush=True)"


class Hosts:
    """Hosts by name only: what is started on one runs here, and is told its number."""

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        return ["env", f"HOST={host}", *command]


def spec(workers: int = 2) -> JobSpec:
    return JobSpec(command=(sys.executable, "-c", TELL), ranks=workers, timeout_s=30)


@pytest.mark.parametrize(
    ("on_workers", "workers", "servers", "hosts", "needed"),
    [
        (False, 2, 2, ("h2", "h3"), 4),
        (False, 2, 1, ("h2",), 3),
        (True, 2, 2, ("h0", "h1"), 2),
        (True, 2, 3, ("h0", "h1", "h0"), 2),
        (True, 3, 1, ("h0",), 3),
    ],
)
def test_servers_have_hosts_after_the_workers_or_the_workers_in_turn(on_workers, workers, servers, hosts, needed):
    placed = ServerSpec(count=servers, on_workers=on_workers)
    assert server_hosts(spec(workers), placed, shaped=True) == hosts
    assert hosts_needed(spec(workers), placed) == needed
    assert len(set(server_hosts(spec(workers), placed, shaped=False))) == 1, "this machine"


@pytest.mark.parametrize(
    ("on_workers", "told"),
    [
        (
            False,
            {
                "rank0": "0 worker 10.0.0.1 10.0.0.3",
                "rank1": "1 worker 10.0.0.2 10.0.0.3",
                "scheduler": "2 scheduler 10.0.0.3 10.0.0.3",
                "server0": "2 server 10.0.0.3 10.0.0.3",
                "server1": "3 server 10.0.0.4 10.0.0.3",
                "server2": "4 server 10.0.0.5 10.0.0.3",
            },
        ),
        (
            True,
            {
                "rank0": "0 worker 10.0.0.1 10.0.0.1",
                "rank1": "1 worker 10.0.0.2 10.0.0.1",
                "scheduler": "0 scheduler 10.0.0.1 10.0.0.1",
                "server0": "0 server 10.0.0.1 10.0.0.1",
                "server1": "1 server 10.0.0.2 10.0.0.1",
                "server2": "0 server 10.0.0.1 10.0.0.1",
            },
        ),
    ],
)
def test_every_process_is_started_on_its_host_and_told_its_address(on_workers: bool, told: dict[str, str], tmp_path: Path):
    run_with_servers(spec(), tmp_path, ServerSpec(count=3, on_workers=on_workers, code=TELL), hosts=Hosts())
    assert {name: (tmp_path / name / "log").read_text().strip() for name in told} == told


ALONE = (
    "import os; from pathlib import Path; mine = Path('/dev/shm') / ('of-' + os.environ['DMLC_WORKER_ID']); mine.touch();"
    "print(mine.name, [path.name for path in Path('/dev/shm').iterdir()], flush=True)"
)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a /dev/shm of one's own needs root and unshare")
def test_workers_of_byteps_share_no_memory_and_know_their_number(tmp_path):
    servers = replace(byteps_servers(1, worker_env=lambda rank: {"MINE": str(rank)}), code="")
    job = JobSpec(command=(sys.executable, "-c", ALONE), ranks=2, timeout_s=30)
    run_with_servers(job, tmp_path, servers)
    logs = [(tmp_path / f"rank{rank}" / "log").read_text().strip() for rank in range(2)]
    assert logs == ["of-0 ['of-0']", "of-1 ['of-1']"]
    assert servers.worker_env(1)["MINE"] == "1"


def test_variables_of_the_job_say_how_many_servers_there_are_and_where():
    assert servers_of({}, 3) == 3
    assert servers_of({"DMLC_NUM_SERVER": "1"}, 3) == 1
    assert [on_workers_of(env) for env in ({}, {"DPRO_SEARCH_SERVER_HOSTS": "own"}, {"DPRO_SEARCH_SERVER_HOSTS": "workers"})] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("text", ["worker", "", "1"])
def test_a_place_that_servers_do_not_have_is_one_line(text):
    with pytest.raises(InputError, match=f"^DPRO_SEARCH_SERVER_HOSTS={text}: known are own, workers$"):
        on_workers_of({"DPRO_SEARCH_SERVER_HOSTS": text})


def test_a_look_at_a_server_that_is_ending_does_not_count(tmp_path):
    """Its threads are gone by then, and what they used with them: the server works for a while and ends before the workers do."""
    job = JobSpec(command=(sys.executable, "-c", "import time; time.sleep(1.5)"), ranks=1, timeout_s=30)
    work = "import time\nuntil = time.monotonic() + 0.5\nwhile time.monotonic() < until: pass"
    run_with_servers(job, tmp_path, ServerSpec(count=1, code=work))
    looks = json.loads((tmp_path / "server0" / "cpu.json").read_text())
    used_ns = [used for _, used in looks]
    assert used_ns == sorted(used_ns)
    assert used_ns[-1] > 2e7, "what it had used when it ended, not 0"
