"""Plans of parallel jobs as files of frameworks; what a framework cannot express is refused by the setting's name."""

from __future__ import annotations

import json
import re

import pytest

from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.targets import targets_named
from dpro_search.errors import InputError
from dpro_search.kinds import all_targets
from dpro_search.parallel import KIND
from dpro_search.space.plan import Plan
from tests.every_case import every_case
from tests.parallel.parallel_exports import exported


def test_stages_of_torchtitan_have_the_layers_that_were_predicted(tmp_path):
    export = exported(tmp_path, "torchtitan", {"pp": 4, "zero_stage": 1, "micro_batch": 2}, cluster="8xh100", global_batch=32)
    content = json.loads((export.folder / "torchtitan_plan.json").read_text())
    parts = content["parallelism"]["module_fqns_per_model_part"]
    assert parts[0][:2] == ["tok_embeddings", "layers.0"]
    assert parts[-1][-3:] == ["layers.31", "norm", "lm_head"]
    assert content["training"]["local_batch_size"] == 16
    assert "--module torchtitan_plan --config planned" in export.usage
    assert "on PYTHONPATH" in export.usage


def test_megatrons_arguments_are_the_same_for_a_shell_and_as_json(tmp_path):
    export = exported(tmp_path, "megatron", {"tp": 2, "pp": 2, "recompute": "full"})
    words = json.loads((export.folder / "megatron_arguments.json").read_text())
    script = (export.folder / "megatron_arguments.sh").read_text()
    assert re.search(r"\((.*)\)", script, re.DOTALL)[1].split() == words
    assert " ".join(words).startswith("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    assert "--use-distributed-optimizer" in words


def test_megatron_recomputes_the_first_layers_of_a_stage_and_sums_gradients_as_planned(tmp_path):
    settings = {"pp": 2, "recompute": "full", "recompute_layers": 3, "gradient_dtype": "bf16"}
    words = " ".join(json.loads((exported(tmp_path, "megatron", settings).folder / "megatron_arguments.json").read_text()))
    assert "--recompute-method block --recompute-num-layers 3" in words
    assert "--grad-reduce-in-bf16" in words


def test_an_export_says_what_was_predicted_and_tested(tmp_path):
    readme = (exported(tmp_path, "deepspeed", {"zero_stage": 3}, framework="fsdp").folder / "README.md").read_text()
    assert "Times are predicted as PyTorch FSDP runs a step." in readme
    assert re.search(r"Checked with deepspeed [\d.]+\.", readme)


@every_case(
    ("target", "settings", "reason"),
    [
        ("torchtitan", {"zero_stage": 1}, "zero_stage: torchtitan cannot express it; .*set zero_stage=3"),
        ("megatron", {"pp": 2, "schedule": "zero-bubble"}, "schedule: megatron cannot express it; zero-bubble is not one"),
        ("megatron-bridge", {"pp": 2, "schedule": "gpipe"}, "schedule: megatron-bridge cannot express it"),
        ("deepspeed", {"tp": 2}, "sequence_parallel: deepspeed cannot express it; .*set sequence_parallel=false"),
        ("deepspeed", {"cp": 2}, "cp: deepspeed cannot express it"),
        ("accelerate", {"pp": 2, "virtual_stages": 2}, "virtual_stages: accelerate cannot express it; .*export to megatron"),
        (
            "torchtitan",
            {"zero_stage": 3, "recompute": "full", "recompute_layers": 3},
            "recompute_layers: torchtitan cannot express it; .*=0",
        ),
        ("deepspeed", {"gradient_dtype": "bf16"}, "gradient_dtype: deepspeed cannot express it"),
        ("pytorch", {"cp": 2}, "cp: pytorch cannot express it; .*export to torchtitan"),
    ],
)
def test_what_a_framework_cannot_express_is_refused(tmp_path, target, settings, reason):
    with pytest.raises(InputError, match=reason):
        exported(tmp_path, target, settings)
    assert not (tmp_path / "plan").exists()


def test_a_plan_without_its_job_is_refused():
    (megatron,) = targets_named(["megatron"], KIND.targets)
    with pytest.raises(InputError, match="tp: degrees follow from the job: export from the folder of the search"):
        megatron.part(Plan.of(tp=2), JobFacts())


def test_a_version_that_was_not_tested_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setattr("dpro_search.parallel.export.workloads._installed", lambda package: "9.1")
    assert "Warning: accelerate 9.1 is installed here" in exported(tmp_path, "accelerate", {"zero_stage": 3}).usage


def test_targets_of_one_name_are_told_apart_by_the_job():
    named = [target for target in all_targets() if target.name == "pytorch"]
    assert len(named) == 2
    assert sum("tp" in target.fields for target in named) == 1
