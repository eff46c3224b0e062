"""Hosts with CPU quotas: real processes take as long as their quota says, it changes while they run, and nothing is left behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.collect.launch import cpu_quota, netns
from dpro_search.collect.launch.cpu_quota import hosts_with_quotas
from dpro_search.collect.launch.host_limits import HostLimits
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores, run_ranks
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import PYTORCH_DDP
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.kinds import recorded_job


def _can_limit() -> bool:
    try:
        with cpu_quota.CpuQuotas(1, (0.5,)):
            return True
    except netns.MissingCapabilityError:
        return False


pytestmark = [pytest.mark.integration, pytest.mark.skipif(not _can_limit(), reason="CPU quotas need root and control groups")]

# Prints the part of a core that each of some computations had, which take the same CPU time.
WORK = """
import json, sys, time
def work():
    begun, used = time.perf_counter(), time.process_time()
    while time.process_time() - used < float(sys.argv[2]):
        pass
    return (time.process_time() - used) / (time.perf_counter() - begun)
end = time.perf_counter() + float(sys.argv[1])
print(json.dumps([work() for _ in iter(lambda: time.perf_counter() < end, False)]))
"""


def groups(pid: int | None = None) -> list[Path]:
    folder = cpu_quota._controller().folder
    return [path for path in folder.iterdir() if re.fullmatch(rf"dps{pid or os.getpid()}h\d+", path.name)]


def test_a_host_of_a_quarter_of_a_core_takes_four_times_as_long():
    """At least: on a busy machine more."""
    with ShapedHosts(2, 1e9, HostLimits(cpus=(1.0, 0.25))) as hosts:
        run = subprocess.run(hosts.command(1, [sys.executable, "-c", WORK, "1", "0.1"]), capture_output=True, text=True, check=True)
        assert len(groups()) == 2
    assert max(json.loads(run.stdout)) < 0.3
    assert not groups()


def test_ranks_of_one_machine_get_other_quotas_while_they_run(tmp_path):
    limits = HostLimits(cpus=(0.5, 0.5), changes_text=("2s:h1.cpus=0.02",))
    spec = JobSpec(command=(sys.executable, "-c", WORK, "4", "0.02"), ranks=2, limits=limits, timeout_s=60)
    with hosts_with_quotas(2, limits) as hosts:
        run_ranks(spec, tmp_path, [{}, {}], hosts=hosts)
    steady, changed = (json.loads((tmp_path / f"rank{rank}" / "log").read_text()) for rank in range(2))
    assert changed[-1] < 0.03 < min(steady[-1], max(changed))
    assert not groups()


def test_a_link_changes_while_the_job_runs():
    with ShapedHosts(2, 1e9, HostLimits(changes_text=("0.2s:h1.rate=100mbit",))) as hosts:
        command = hosts.command(1, ["sh", "-c", "tc qdisc show dev eth0; sleep 1; tc qdisc show dev eth0"])
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        other = subprocess.run(hosts.command(0, ["tc", "qdisc", "show", "dev", "eth0"]), capture_output=True, text=True, check=True)
    assert re.findall(r"rate (\S+)", output) == ["1Gbit", "100Mbit"]
    assert re.findall(r"rate (\S+)", other.stdout) == ["1Gbit"]
    assert not groups()  # no host had a quota


HOLD = """
import subprocess, sys, time
from dpro_search.collect.launch.cpu_quota import CpuQuotas
with CpuQuotas(2, (0.5, 0.5)) as hosts:
    subprocess.Popen(hosts.command(1, ["sleep", "60"]), start_new_session=True)
    time.sleep(0.2)
    print("up", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_by_the_next():
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.wait(timeout=20)
    left = groups(process.pid)
    assert len(left) == 2
    assert (left[0] / "cgroup.procs").read_text() + (left[1] / "cgroup.procs").read_text()
    cpu_quota.remove_leftovers()
    assert not groups(process.pid)


def test_a_recorded_job_keeps_its_quotas_and_runs_again_with_them(torch_python: str, tmp_path: Path):
    limits = HostLimits.parse("1,0.5", ["60s:h1.rate=1gbit"])
    command = (torch_python, str(Path(__file__).with_name("ddp_job.py")), "plain")
    spec = JobSpec(command=command, ranks=2, cores=default_cores(2, 1, limits), limits=limits)
    schedule = StepSchedule(warmup=3, untraced=4, traced=3)
    PYTORCH_DDP.record(spec, tmp_path / "trace", rate_bps=2e9, shaped=True, schedule=schedule)
    trace = Trace.load(tmp_path / "trace")
    assert trace.meta.host_cpus == (1.0, 0.5)
    assert trace.meta.host_changes == ("60s:h1.rate=1gbit",)
    assert recorded_job(trace, command).spec.limits == limits
    assert not groups()
    with pytest.raises(InputError, match="record the job with --rate as well"):
        PYTORCH_DDP.record(spec, tmp_path / "other", schedule=schedule)
