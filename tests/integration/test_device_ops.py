"""`fit --collect device` on this machine's core, with the real PyTorch."""

import json
import os
import subprocess
import sys

import pytest

from dpro_search.cluster import bundled
from dpro_search.cluster.files import load_device
from dpro_search.costmodel.devices import OpSpec
from dpro_search.costmodel.devices.choice import usual_ops
from dpro_search.costmodel.devices.written import STREAMED
from dpro_search.measure.ops import OpTimer

pytestmark = [pytest.mark.integration, pytest.mark.one_core]


def fit(*options, folder):
    command = [sys.executable, "-m", "dpro_search.cli", "fit", "--collect", "device", "--longest", "0.005", *map(str, options)]
    env = {**os.environ, "DPRO_SEARCH_DEVICES": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)


def test_a_core_is_measured_continued_and_named(torch_python, tmp_path):
    first = fit("--budget", 6, "--json", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    facts = json.loads(first.stdout)
    assert (facts["samples"], facts["new"], facts["complete"]) == (6, 6, True)
    assert "fitted to GPUs alone" in facts["outside"]
    more = fit("--budget", 12, folder=tmp_path)
    assert "12 ops, 6 timed now" in more.stdout
    assert "ops that are predicted from the others" in more.stdout
    device = load_device(tmp_path / "my-cpu.toml", bundled.find)
    assert (device.kind, len(device.samples)) == ("cpu", 12)
    assert device.provenance.of("samples").startswith("measured: median of 7 rounds in PyTorch on one core of")


def test_a_file_of_other_versions_is_not_added_to(torch_python, tmp_path):
    assert fit("--budget", 5, folder=tmp_path).returncode == 0
    path = tmp_path / "my-cpu.toml"
    path.write_text(path.read_text().replace("torch 2", "torch 1"))
    again = fit("--budget", 6, folder=tmp_path)
    assert again.returncode == 2
    assert "choose another --name" in again.stderr


def test_an_interpreter_without_torch_is_named(tmp_path):
    for python in (sys.executable, tmp_path / "nothing"):
        done = fit("--python", python, folder=tmp_path)
        assert done.returncode == 1
        assert str(python) in done.stderr
        assert "Traceback" not in done.stderr


def test_every_op_that_can_be_chosen_is_timed_and_one_that_does_not_fit_is_named(torch_python):
    core = bundled.device("h100-sxm")  # has all precisions
    names = {(spec.name, spec.backward): spec for spec in usual_ops(core) if spec.precision == "fp32"}
    small = {"rows": 32, "length": 64, "m": 32, "n": 32, "k": 32, "images": 2, "inputs": 4, "outputs": 8, "side": 14, "window": 3}
    with OpTimer(torch_python) as timer:
        for (name, backward), spec in names.items():
            sizes = {**spec.all_sizes, **{key: value for key, value in small.items() if key in spec.all_sizes}}
            assert timer.time(name=name, precision="fp32", backward=backward, sizes=sizes).us > 0, (name, backward)
        huge = OpSpec.of("gemm", "fp32", m=2**20, n=2**20, k=8)
        assert timer.time(name="gemm", precision="fp32", backward=False, sizes=huge.all_sizes).failed == "out of memory"
        assert timer.device.gpu is None or timer.versions["cuda"]
    assert len(names) > len(STREAMED)
