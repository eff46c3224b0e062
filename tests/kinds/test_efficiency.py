"""Tokens a second, MFU, price and energy of an iteration; what is not known is said."""

import re

import pytest
from importer_kit import shared_trace

from dpro_search.analysis.efficiency import sentences, split_options, table_rows, with_options, work_of
from dpro_search.cluster import parse_cluster
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.graph.op_flops import step_flops
from dpro_search.kinds._work import EFFICIENCY_KEYS, Work, efficiency
from tests.cli.facts import replayed
from tests.every_case import every_case


@pytest.fixture(scope="module")
def resnet():
    return shared_trace("kineto_single/resnet50_v100_workers0.json.gz")


def test_flops_of_resnet_50_are_those_that_papers_give(resnet):
    """4.09 G multiplications and additions an image of 224 x 224 forward, three times that in all; batch 32."""
    work = step_flops(resnet)
    assert work.flops / 32 / 3 / 2 == pytest.approx(4.09e9, rel=0.01)
    assert (work.precision, work.left_out) == ("", "")  # of this old profile, element types are not known


def test_all_that_is_given_is_computed(resnet):
    facts = replayed(resnet, changes=("tokens=64", "peak=15.7 TFLOP/s,price=3", "power=300 W"))
    seconds = facts["predicted_iteration_us"] / 1e6
    assert facts["tokens_per_second_per_device"] == facts["tokens_per_second"] == pytest.approx(64 / seconds)
    assert facts["mfu_pct"] == pytest.approx(facts["flops_per_device"] / seconds / 15.7e12 * 100)
    assert facts["cost_per_million_tokens"] == pytest.approx(3 / 3600 * seconds / 64 * 1e6)
    assert facts["energy_per_iteration_j"] == pytest.approx(300 * seconds)
    assert facts["not_known"] == {}
    assert facts["measured_iteration_us"] is not None  # facts are no change of the job


def test_what_is_not_known_is_said_and_not_invented():
    figures = efficiency(Work(device="NVIDIA X", flops=1e12, precision="bf16"), 1e6)
    assert all(getattr(figures, key) is None for key in EFFICIENCY_KEYS)
    assert set(figures.not_known) == set(EFFICIENCY_KEYS)
    assert figures.not_known["mfu_pct"] == "the peak of 'NVIDIA X' at bf16 (give --set peak=FLOP/s)"
    assert sentences(figures) == []


def test_a_device_that_the_trace_names_has_its_peak_and_power():
    trace = shared_trace("kineto_dlrm_8ranks")
    work = work_of(trace, None, {})
    assert (work.devices, work.peak_flops_per_s, work.power_per_device_w) == (8, 15.7e12, pytest.approx(437.5))


def test_a_named_cluster_has_price_and_power():
    machine = parse_cluster("2xp4d.24xlarge")
    work = work_of(None, machine, {"tokens": 1e6, "flops": 1e12, "peak": 312e12}, devices=16)
    facts = efficiency(work, 1e6)
    price = machine.price_per_device_hour_usd
    assert facts.cost_per_million_tokens == pytest.approx(price * 16 / 3600)
    assert facts.tokens_per_second_per_device == 1e6 / 16


def test_options_are_told_from_changes():
    assert split_options(["tokens=8k, compute=0.9", "rank0=usual"]) == ({"tokens": 8000.0}, ("compute=0.9", "rank0=usual"))
    for text in ("tokens=0", "price=cheap", "flops=-1"):
        with pytest.raises(InputError, match=text):
            split_options([text])


def test_matrix_products_count_two_for_each_multiplication(tmp_path):
    from kineto_files import START, small_job

    profile = small_job(steps=2)
    shapes = {"aten::addmm": [[4], [3, 5], [5, 4]], "aten::bmm": [[2, 3, 5], [2, 5, 4]], "aten::add": [[3, 5], [3, 5]]}
    for step in range(2):
        for place, (name, dims) in enumerate(shapes.items()):
            at = START + 200 * step + 40 + 5 * place
            profile.op(name, at, 3, **{"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)})
    from dpro_search.collect.readers.kineto.importer import read

    work = step_flops(read([profile.write(tmp_path / "trace.json")]))
    assert work.flops == 2 * 3 * 5 * 4 + 2 * 2 * 3 * 5 * 4
    assert work.precision == "bf16"


def test_a_trace_without_shapes_has_no_flops():
    assert step_flops(shared_trace("kineto_single/convnet_v100_ns_timestamps.json.gz")) is None


def test_the_precision_of_given_flops_is_that_of_the_kernels():
    """Convolutions of an A100 compute in TF32, whose peak is 156 TFLOP/s."""
    facts = replayed(Trace.load(sample_trace_path("resnet50_ddp_a100")), changes=("flops=8e11",))
    seconds = facts["predicted_iteration_us"] / 1e6
    assert facts["mfu_pct"] == pytest.approx(8e11 / seconds / 156e12 * 100, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "what_ifs", "wrong"),
    [
        ({"flops": 1e15}, False, "Wrong is flops= (as given)"),
        ({"peak": 1e12, "flops": 2e12}, False, "Wrong is flops= (as given) or peak= (as given)"),
        ({}, False, "the precision, the name of the device"),
        ({}, True, "Wrong is the what-if"),
    ],
)
def test_an_mfu_above_100_is_doubted_and_says_which_input_must_be_wrong(given, what_ifs, wrong):
    work = with_options(Work(device="NVIDIA X", flops=1e15, precision="bf16", peak_flops_per_s=3e14), given)
    facts = efficiency(work, 1e6, what_ifs=what_ifs)
    assert facts.mfu_pct > 100
    assert wrong in facts.mfu_doubt
    assert any(line.startswith("doubt about the MFU") for line in sentences(facts))


def test_a_possible_mfu_is_not_doubted():
    facts = efficiency(Work(flops=1e14, peak_flops_per_s=3e14), 1e6)
    assert facts.mfu_doubt is None
    assert not any("doubt" in line for line in sentences(facts))


@every_case("name", ["hgx-h100", "hgx-h200", "hgx-b200", "hgx-b300", "dgx-a100-40", "dgx-a100-80", "dgx-1-v100", "dgx-2"])
def test_usual_machines_have_a_price_whose_source_and_year_are_said(name):
    work = work_of(None, parse_cluster(name), {})
    facts = efficiency(work, 1e6)
    assert re.search(r"list price .* 20\d\d", facts.price_assumed)
    assert facts.price_assumed in dict(table_rows(facts)[0]).values()


def test_a_given_price_is_no_assumption():
    assert efficiency(work_of(None, parse_cluster("hgx-h100"), {"price": 2.0}), 1e6).price_assumed is None


def test_power_is_said_to_be_the_devices_or_with_its_host():
    with_host, alone = (efficiency(work_of(None, parse_cluster(name), {}), 1e6) for name in ("hgx-h100", "rtx-4090"))
    assert with_host.power_assumed == "1275 W a device with its share of the host, at full power"
    assert alone.power_assumed.endswith("a device without its host, at full power")
