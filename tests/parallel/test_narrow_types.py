"""mxfp8 and nvfp4: rates, bytes of their blocks' scales, devices that have them, what exports write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.export.megatron import _MIXED, _arguments, settings
from dpro_search.parallel.gpu_ops import NARROW, OpCosts
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import Adapters, blocks_of, parameters_of, published
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import Workload
from tests.kinds.verbs import refusal, verb
from tests.parallel.jobs import text


def device(name):
    return parse_cluster(name).groups[0].host.device


@pytest.mark.parametrize(("precision", "rate"), [("mxfp8", "fp8"), ("nvfp4", "fp4")])
def test_products_reach_the_peak_of_the_units_that_read_scales(precision, rate):
    b200 = device("hgx-b200")
    assert b200.peak_flops_per_s(precision) == b200.peak_flops_per_s(rate)


def test_blocks_have_scales():
    """Eight bits for each 32 elements of mxfp8, and for each 16 of nvfp4."""
    assert NARROW["mxfp8"].element_bytes == (32 + 1) / 32
    assert NARROW["nvfp4"].element_bytes == (16 / 2 + 1) / 16


def test_large_products_are_faster_with_fewer_bits():
    times_us = [OpCosts(device("hgx-b200"), precision).matmul_us(16384, 16384, 16384) for precision in ("bf16", "mxfp8", "nvfp4")]
    assert times_us[0] > 1.5 * times_us[1] > 2 * times_us[2]


def layer_us(precision, **model):
    job = Workload(
        model=replace(published("llama3-70b"), **model),
        sequence=8192,
        strategy=Strategy(dp=2, tp=4, sequence_parallel=True, global_batch=2),
        cluster=parse_cluster("1xhgx-b200"),
        precision=precision,
    )
    block = next(block for block in blocks_of(job.model) if block.name == "layer")
    return Pricer(job).layer(block).forward_us, job


def test_a_layer_is_faster_too_though_tensors_are_quantized_first():
    bf16, mxfp8, nvfp4 = (layer_us(precision)[0] for precision in ("bf16", "mxfp8", "nvfp4"))
    assert bf16 > mxfp8 > nvfp4


def test_weights_that_nothing_updates_are_kept_by_rows_and_by_columns():
    """Each pass reads blocks along its own reduction; fp8 has one scale for the whole."""
    adapters = Adapters(rank=8, targets=("q_proj",))
    jobs = {precision: layer_us(precision, adapters=adapters)[1] for precision in ("fp8", "mxfp8", "nvfp4")}
    weights = {precision: peak_memory(each).weights_bytes for precision, each in jobs.items()}
    trained = parameters_of(replace(published("llama3-70b"), adapters=adapters)) - parameters_of(published("llama3-70b"))
    assert weights["mxfp8"] == pytest.approx(2 * 33 / 32 * weights["fp8"], rel=3 * trained / 70e9)
    assert weights["nvfp4"] == pytest.approx(2 * 9 / 16 * weights["fp8"], rel=3 * trained / 70e9)


@pytest.mark.parametrize(
    ("cluster", "precision", "said"),
    [
        ("1xhgx-h100", "mxfp8", ":5: precision: NVIDIA H100 SXM5 80GB has no units for mxfp8, whose blocks have scales"),
        ("1xmi355x-platform", "nvfp4", "has no units for nvfp4"),
        ("1xhgx-b200", "mxfp4", "precision: 'mxfp4' is not known; did you mean 'mxfp8'?"),
    ],
)
def test_a_device_without_such_units_is_refused(tmp_path, cluster, precision, said):
    (tmp_path / "job.toml").write_text(text(cluster=cluster, precision=precision))
    line = refusal("replay", tmp_path / "job.toml")
    assert said in line.replace('"', "")


def test_what_if_a_job_were_in_mxfp8(tmp_path):
    (tmp_path / "job.toml").write_text(text("tp = 1", cluster="1xhgx-b200"))
    usual, narrow = (
        verb("replay", tmp_path / "job.toml", *more)["predicted_iteration_us"] for more in ((), ("--set", "precision=mxfp8"))
    )
    assert narrow < usual


@pytest.mark.parametrize(("precision", "recipe"), [("mxfp8", "bf16_with_mxfp8_mixed"), ("nvfp4", "bf16_with_nvfp4_mixed")])
def test_megatrons_recipes_are_named(precision, recipe):
    assert _MIXED[precision] == recipe
    arguments = [" ".join(each) for each in _arguments(settings(layer_us(precision)[1], "megatron"), precision)]
    assert any(each.endswith(f"-recipe {precision}") for each in arguments)
    assert "--bf16" in arguments


def test_experts_of_an_unknown_width_are_said(tmp_path):
    setup = {"model": "mixtral-8x7b", "cluster": "1xhgx-h100"}
    (tmp_path / "job.toml").write_text(text("tp = 2\nep = 4", **setup))
    assert "splits it over as many as tp (etp = 2)" in " ".join(verb("replay", tmp_path / "job.toml")["assumed"])
    (tmp_path / "job.toml").write_text(text("tp = 2\nep = 4\netp = 2", **setup))
    assert "assumed" not in verb("replay", tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(text("expert_tensor_parallel_size = 2", **setup))
    assert "is said in [runs] by ep and etp" in refusal("replay", tmp_path / "job.toml")


def test_a_device_says_which_precision_it_lacks():
    with pytest.raises(InputError, match="no units for mxfp8"):
        OpCosts(device("dgx-a100-80"), "mxfp8")
