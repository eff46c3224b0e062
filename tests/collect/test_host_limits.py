"""What hosts may use, as a user writes it, and where the kernel is told so."""

from pathlib import Path

import pytest

from dpro_search.collect.launch.cpu_quota import Controller
from dpro_search.collect.launch.host_limits import CpusChange, HostLimits, RateChange
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.while_running import changing
from dpro_search.errors import InputError, MissingCapabilityError
from tests.every_case import every_case


def test_quotas_and_changes_are_read_as_they_are_written():
    limits = HostLimits.parse("1, 0.25", ["90s:h1.rate=50mbit", "500ms:h0.cpus=0.5", "2s:h1.rate=unlimited"])
    assert limits.cpus == (1.0, 0.25)
    assert limits.changes == (
        CpusChange(after_s=0.5, host=0, cpus=0.5),
        RateChange(after_s=2.0, host=1, rate_bps=None),
        RateChange(after_s=90.0, host=1, rate_bps=5e7),
    )
    assert not HostLimits.parse(None)


@every_case(
    ("cpus", "changes", "message"),
    [
        ("1,0", (), r"--host-cpus: a host's quota is a number of cores, at least 0.01, not 0"),
        ("1,x", (), r"'x'"),
        ("1,1", ("30s:rank1=0.5",), r"--host-change 30s:rank1=0.5: write it like 30s:h2.cpus=0.25"),
        ("1,1", ("soon:h1.cpus=0.5",), r"'soon' is not a time|soon"),
        ("1,1", ("3s:h1.cpus=-1",), r"--host-change 3s:h1.cpus=-1: a host's quota"),
        ("1,1", ("3s:h1.rate=fast",), r"fast"),
        ("1,1,1", (), r"--host-cpus: 3 quotas, and 2 hosts"),
        (None, ("3s:h2.cpus=1",), r"--host-change 3s:h2.cpus=1: there are 2 hosts, h0 to h1"),
    ],
)
def test_what_is_no_limit_of_these_hosts_is_one_line(cpus, changes, message):
    with pytest.raises(InputError, match=message) as refused:
        JobSpec(command=("true",), ranks=2, limits=HostLimits.parse(cpus, changes))
    assert "\n" not in str(refused.value)


def test_hosts_that_share_cores_share_them_by_their_quotas(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5})
    assert default_cores(4, limits=HostLimits.parse("0.2,0.2,0.4,0.8")) == (5, 5, 5, 4)
    assert default_cores(2, limits=HostLimits.parse("1,0.5")) == (4, 5)
    assert default_cores(2, limits=HostLimits.parse("2,1")) == ()


def test_the_controller_of_version_1_is_the_one_with_cpu():
    mounts = "cgroup /c/cpuset cgroup rw,cpuset 0 0\ncgroup /c/cpu cgroup rw,relatime,cpu,cpuacct 0 0\n"
    assert Controller.of(mounts) == Controller(folder=Path("/c/cpu"), unified=False)


def test_the_controller_of_version_2_is_told_a_quota_and_a_period(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    controller = Controller.of(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert controller == Controller(folder=tmp_path, unified=True)
    group = controller.make("dps1h0")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    for cpus, written in ((0.25, "2500 10000"), (3.0, "30000 10000"), (0.05, "1000 20000")):
        controller.limit(group, cpus)
        assert (group / "cpu.max").read_text() == written


def test_without_the_controller_there_is_none(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert Controller.of(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n/dev/sda / ext4 rw 0 0\n") is None


def test_a_change_that_fails_fails_the_job():
    def refuse(change):
        raise MissingCapabilityError(f"no {change.host}")

    soon = CpusChange(after_s=0.0, host=7, cpus=1.0)
    with pytest.raises(MissingCapabilityError, match="no 7"), changing([soon], refuse):
        pass
