"""Frameworks read exports of parallel plans with their own parsers and configuration classes."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.parallel.parallel_exports import exported

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("parallel_exports_job.py")
RANKS, LAYERS = 16, 32
CASES = {
    "torchtitan fsdp": {"zero_stage": 3, "tp": 2, "micro_batch": 2},
    "torchtitan pipeline": {"pp": 2, "tp": 2, "zero_stage": 1, "virtual_stages": 2, "recompute": "full"},
    "megatron tp, pp": {"tp": 2, "pp": 2, "virtual_stages": 2, "recompute": "full"},
    "megatron uneven": {"pp": 16, "virtual_stages": 1, "recompute": "selective", "zero_stage": 1, "micro_batch": 1},
    "megatron cp": {"cp": 2, "tp": 2},
    "megatron fsdp": {"zero_stage": 3},
    "megatron-bridge tp, pp": {"tp": 2, "pp": 2, "virtual_stages": 2, "recompute": "full"},
    "megatron-bridge cp": {"cp": 2, "recompute": "selective"},
    "deepspeed zero 3": {"zero_stage": 3, "micro_batch": 2},
    "deepspeed tp": {"zero_stage": 1, "tp": 2, "sequence_parallel": False},
    "accelerate fsdp": {"zero_stage": 3, "tp": 2, "sequence_parallel": False, "recompute": "full"},
    "accelerate cp": {"zero_stage": 3, "cp": 2},
    "accelerate pipeline": {"zero_stage": 1, "pp": 2, "tp": 4},
}


@pytest.fixture(scope="module")
def read(parallel_python, tmp_path_factory):
    """What each framework read of its exports."""
    root = tmp_path_factory.mktemp("read")
    for name, settings in CASES.items():
        target = name.split()[0]
        # with 30 layers Megatron's stages have different numbers of them
        export = exported(root / "jobs" / name, target, settings, **({"model": "starcoder2-3b"} if "uneven" in name else {}))
        (root / "exports").mkdir(exist_ok=True)
        folder = export.folder.rename(root / "exports" / name)
        replicas = RANKS // settings.get("tp", 1) if target == "deepspeed" else RANKS
        (folder / "ranks.json").write_text(str(replicas))
        (folder / "layers.json").write_text("30" if "uneven" in name else str(LAYERS))
    command = [parallel_python, "-W", "ignore", str(JOB), str(root / "exports")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_torchtitan_makes_the_configuration(read):
    configuration = read["torchtitan fsdp"]
    assert (configuration["type"], configuration["tp"], configuration["reshard"]) == ("Trainer.Config", 2, "always")
    assert configuration["batch"] == [2, 64, 4096]
    assert configuration["short"] == [7, 1]


def test_stages_of_torchtitan(read):
    configuration = read["torchtitan pipeline"]
    assert (configuration["schedule"], configuration["layers"], configuration["reshard"]) == ("Interleaved1F1B", [8] * 4, "never")
    assert configuration["recompute"] == "FullAC.Config"
    assert configuration["batch"] == [16, 64, 4096]


def test_megatron_core_takes_the_settings(read):
    assert (read["megatron tp, pp"]["tp"], read["megatron tp, pp"]["virtual"]) == (2, 2)
    assert read["megatron uneven"]["layout"] == 16
    assert read["megatron cp"]["zero"] is True
    for name in ("megatron tp, pp", "megatron cp", "megatron fsdp"):  # arguments of Megatron-LM's own training loop
        assert set(read[name]["rest"]) == {"bf16", "global_batch_size", "micro_batch_size", "seq_length"} - (
            set() if "bf16" in read[name]["rest"] else {"bf16"}
        )


def test_megatron_bridge_has_each_setting(read):
    for name in ("megatron-bridge tp, pp", "megatron-bridge cp"):
        assert read[name]["unknown"] == []
        assert read[name]["places"] > 8


def test_deepspeed_reads_the_file(read):
    assert read["deepspeed zero 3"] == {"batch": [64, 2, 2], "zero": 3, "tp": 0, "bf16": True}
    assert read["deepspeed tp"] == {"batch": [64, 1, 8], "zero": 1, "tp": 2, "bf16": True}


def test_accelerate_makes_the_plugins(read):
    configuration = read["accelerate fsdp"]
    assert configuration == {"type": "fsdp", "sizes": [1, 8, 2, 1], "version": 2, "reshard": True, "recompute": True}
    assert read["accelerate cp"]["sizes"] == [1, 8, 1, 2]
    assert read["accelerate pipeline"] == {"type": "megatron", "tp": 4, "pp": 2}
