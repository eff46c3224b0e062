"""``experiments.devices``: what its readers take from public tables, and how devices are left out."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpro_search.cluster import bundled
from dpro_search.costmodel.devices import Stack, attention, gemm, joined
from dpro_search.costmodel.devices.choice import nearest_to_centres
from experiments.devices import __main__ as devices
from experiments.devices import deepbench, sailor
from experiments.devices.data import drawn, of_training
from experiments.devices.table import device_of, family_of, table
from tests.every_case import every_case
from tests.in_process import called

ROOT = Path(__file__).parents[2]


def test_a_folder_without_measurements_is_refused_in_one_line(tmp_path):
    done = called(devices, "score", tmp_path)
    assert done.returncode == 2
    assert "no measured ops; expected neusight/, sailor/, deepbench/, vidur/ or tuned/ in it" in done.stderr


def test_json_is_printed_whatever_a_folder_holds_and_says_what_was_left_out(tmp_path):
    (tmp_path / "neusight").mkdir()
    columns = {
        "device": ["New GPU"] * 400 + ["No Sheet"] * 3,
        "b": [1] * 403,
        "m": [64 + n % 40 for n in range(403)],
        "n": [64 + 64 * (n // 40) for n in range(403)],
        "k": [512] * 403,
        "latency_ms": [0.05] * 403,
        "surplus": [0] * 403,
    }
    pq.write_table(pa.table(columns), tmp_path / "neusight" / "linear.parquet")
    pq.write_table(pa.table({"device": ["New GPU"]}), tmp_path / "neusight" / "bmm.parquet")
    (tmp_path / "neusight" / "conv.parquet").write_text("damaged")
    sheet = {"Device": "New GPU", "Mem_Bw": 1600, "Num_Sm": 100, "Freq": 1500, "SingleFLOPs": 20000, "L2Cache": 40}
    (tmp_path / "neusight" / "devices.json").write_text(json.dumps([sheet]))
    done = called(devices, "score", tmp_path, "--json", "--parts", "shipped,families,nonsense")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert {line["target"] for line in facts["by_target"]} == {"neusight New-GPU"}
    left_out = " ".join(facts["left_out"])
    for reason in (
        "bmm.parquet: has no column latency_ms",
        "conv.parquet: cannot be read",
        "No-Sheet",
        "too few to leave a family out",
    ):
        assert reason in left_out
    assert "nonsense" in facts["errors"][0]


def test_equal_ops_are_joined_at_their_median():
    ops = gemm([64, 64, 64, 128], 64, 64, precision="fp32")
    joined = table(ops, np.array([1.0, 9.0, 2.0, 5.0]), "source device")
    assert dict(zip(joined.ops.m, joined.us, strict=True)) == {64: pytest.approx(2.0), 128: pytest.approx(5.0)}
    assert joined.spread[joined.ops.m == 64] == pytest.approx(np.log(9))


def test_deepbench_convolutions_among_the_products_are_left_out(tmp_path):
    (tmp_path / "deepbench").mkdir()
    (tmp_path / "deepbench" / "gemm.csv").write_text(
        "device,phase,sheet,m,n,k,ta,tb,metric,ms\n"
        "NV_V100,train,Results FP32,1760,16,1760,N,N,Time (msec),0.038\n"
        "NV_V100,train,Results FP32,7,7,512,8,512,Time (msec),3.0\n"
        "IA_KNL7250,train,Results - FP32,1760,16,1760,N,N,Time (msec),0.3\n"
    )
    skipped = []
    (op_table,) = deepbench.read(tmp_path, skipped)
    assert op_table.us == pytest.approx([38.0])
    assert any("IA_KNL7250: no bundled device has this name" in line for line in skipped)


def test_dims_of_a_sailor_model_follow_from_its_tensors():
    def row(name, **sizes):
        return {"op_name": name, "mbs": 2, "dtype": "fp16", "input_size": 0.0, "activations": 0.0, "weights": 0.0, **sizes}

    dims = sailor.dims_of(
        [
            row("enc-1st-layernorm", input_size=2 * 2048 * 2560 * 2 / 2**20),
            row("enc-attention-softmax", activations=2 * 32 * 2048 * 2048 * 2 / 2**20),
            row("encoder-embedding", weights=(128256 + 2048) * 2560 * 2 / 2**20),
        ]
    )
    assert dims == sailor.Dims(hidden=2560, heads=32, vocabulary=128256)


def test_the_sentinel_of_an_op_out_of_memory_is_no_latency(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"op_name": name, "fwd_us": us, "bwd_us": us, "input_size": 4.0, "output_size": 8.0, "weights": 102.188,
         "activations": 128.0, "device": "V100-16", "dtype": "fp16", "model": "OPT-350", "mbs": 1, "tp": 1, "algo": 0, "oom": False}
        for name, us in (("enc-1st-layernorm", 70.0), ("enc-attention-softmax", 294.0), ("encoder-embedding", 1e7))
    ]  # fmt: skip
    (tmp_path / "sailor").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "sailor" / "ops.parquet")
    skipped = []
    (op_table,) = sailor.read(tmp_path, skipped)
    assert sorted(op_table.us) == pytest.approx([70.0, 70.0, 294.0, 294.0])
    assert "1 rows hold 1e+07 us, which stands for out of memory" in skipped[0]


@every_case(
    ("name", "family"),
    [
        ("NVIDIA-A100-PCIE-40GB", "ampere"),
        ("RTX-3090", "ampere"),
        ("GH-96", "hopper"),
        ("AMD-Instinct-MI210", "cdna"),
        ("AMD_MI25", "gcn"),
        ("NV_M40", "maxwell"),
        ("NV_TitanX_Pascal", "pascal"),
        ("AMD Instinct MI250", "cdna"),
        ("Titan-RTX", "turing"),
    ],
)
def test_names_of_sources_are_devices_of_an_architecture(name, family):
    assert family_of(device_of(name)) == family


def test_every_bundled_gpu_has_an_architecture():
    gpus = [device for name in bundled.names("device") if (device := bundled.device(name)).kind == "gpu"]
    assert not [device.name for device in gpus if family_of(device) == device.name]


def test_a_seed_draws_the_same_ops_on_every_device():
    ops = gemm([1, 2, 3, 4], 8, 8, precision="fp32")
    assert np.array_equal(drawn(ops, 0)[2:], drawn(ops[np.array([2, 3])], 0))
    assert not np.array_equal(drawn(ops, 0), drawn(ops, 1))


def test_samples_are_spread_over_categories():
    from dpro_search.costmodel.devices.correction import COORDINATES, OpPoints

    random = np.random.default_rng(0)
    category = np.repeat([1.0, 2.0, 3.0], [300, 30, 30])
    points = OpPoints(
        at=random.normal(size=(360, len(COORDINATES))),
        kind=category,
        category=category,
        leaves=np.zeros((360, 0), np.uint8),
        families=np.zeros((360, 0), np.float32),
    )
    chosen = nearest_to_centres(points, 12, 0)
    assert len(set(chosen.tolist())) == 12
    assert set(category[chosen]) == {1.0, 2.0, 3.0}


def test_the_fit_for_training_takes_no_rows_of_tuned_kernels_or_of_other_layouts():
    ops = joined(
        [
            gemm(64, 128, 256, precision="bf16", transposes=1.0),
            gemm(64, 512, 128, batch=16, precision="bf16"),  # of latent attention
            gemm(64, 128, 256, precision="fp8", transposes=1.0),
            attention(1, 8, 8, 64, 64, 64, causal=True, precision="bf16", stack=Stack.SERVING),
        ]
    )
    names = ("aiconfigurator h100-sxm", "aiconfigurator a100-sxm-80gb", "neusight T4", "aiter mi300x")
    kept = of_training({name: table(ops, np.arange(1.0, 5.0), name) for name in names})
    assert {name: sorted(one.us.tolist()) for name, one in kept.items()} == {
        "aiconfigurator h100-sxm": [1.0, 4.0],
        "aiconfigurator a100-sxm-80gb": [1.0],
        "neusight T4": [1.0, 2.0, 4.0],
    }
