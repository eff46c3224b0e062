"""This machine: what Linux and nvidia-smi say of it."""

import os
from pathlib import Path

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.errors import InputError


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program nvidia-smi that prints given lines, first on the path."""

    def install(*lines: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_without_gpus_each_core_that_may_be_used_is_a_device(smi):
    smi("NVIDIA-SMI has failed", status=9)
    here = parse_cluster("this-machine")
    assert (here.hosts, here.ranks) == (1, len(os.sched_getaffinity(0)))
    assert here.devices[0].kind == "cpu"
    assert here.ranks == 1 or here.level_between(0, here.ranks - 1).level == "loopback"


def test_gpus_of_a_known_kind_have_the_links_of_their_usual_machine(smi):
    smi(*["NVIDIA H100 80GB HBM3, 81559"] * 8)
    here = parse_cluster("this-machine")
    assert here.groups[0].host.device.peak == parse_cluster("h100").groups[0].host.device.peak
    assert here.bandwidth_bytes_per_us(range(8)) == 450e3
    assert here.provenance.of("nvlink.rate") == "derived: as in hgx-h100, the machine that these GPUs usually are part of"


def test_a_gpu_that_is_not_bundled_has_its_memory_and_no_peaks(smi):
    smi("NVIDIA Z900, 1024")
    device = parse_cluster("This Machine").devices[0]
    assert (device.name, device.memory_bytes, device.peak.bf16) == ("NVIDIA Z900", 2**30, None)


def test_gpus_that_differ_are_refused(smi):
    smi("NVIDIA L4, 23034", "Tesla T4, 15360")
    with pytest.raises(InputError, match="GPUs that differ"):
        parse_cluster("this-machine")
