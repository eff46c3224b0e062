"""``experiments.devices``: tables of inference engines and of AMD's tuned kernels."""

import gzip
import json

import pytest

from dpro_search.cluster import bundled
from dpro_search.cluster.files import load_device
from experiments.devices import __main__ as devices
from experiments.devices import aiter, vidur
from tests.in_process import called

PRODUCTS = "m,n,k,dtype,us\n" + "".join(f"{64 + m},4096,4096,bf16,{20 + m % 7}\n" for m in range(200))
AITER = "gfx,device,cu_num,op,dtype,quant,batch,M,N,K,us,err,token,model_dim,inter_dim,experts,topk\n"


def test_a_folder_of_a_device_and_a_model_is_a_source(tmp_path):
    folder = tmp_path / "vidur" / "h100" / "some" / "model"
    folder.mkdir(parents=True)
    (folder / "mlp.csv").write_text(PRODUCTS)
    (tmp_path / "vidur" / "unheard-of").mkdir()
    (tmp_path / "vidur" / "unheard-of" / "mlp.csv").write_text(PRODUCTS)
    skipped = []
    (table,) = vidur.read(tmp_path, skipped)
    assert set(table.target) == {"vidur h100"}
    assert set(table.model) == {"vidur some/model"}
    assert len(table) == 200
    assert "unheard-of: no bundled device has this name" in skipped[0]


def test_a_source_of_one_device_is_scored_by_the_shipped_predictor(tmp_path):
    folder = tmp_path / "vidur" / "h100" / "model"
    folder.mkdir(parents=True)
    (folder / "mlp.csv").write_text(PRODUCTS)
    done = called(devices, "score", tmp_path, "--json", "--parts", "shipped", "--seeds", "0")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert {line["target"] for line in facts["by_target"]} == {"vidur h100"}


def test_tables_become_samples_of_a_device_file(tmp_path):
    (tmp_path / "products.csv").write_text(PRODUCTS)
    out = tmp_path / "mine.toml"
    done = called(devices, "samples", tmp_path / "products.csv", "--specs", "h100-sxm", "--out", out, "--budget", "20")
    assert done.returncode == 0
    device = load_device(out, bundled.find)
    assert len(device.samples) == 20
    assert all(sample.op.startswith("gemm bf16") for sample in device.samples)
    assert "products.csv" in device.provenance.of("samples")


def test_wrong_results_blank_times_and_unknown_devices_are_no_latencies(tmp_path):
    (tmp_path / "tuned").mkdir()
    fields = ",,,,\n"
    rows = [
        "gfx942,MI300X or MI325X,304,gemm,int8/fp8,a8w8 blockscale,,128,4096,4096,20.0,0.0" + fields,
        "gfx942,MI300X or MI325X,304,gemm,int8/fp8,a8w8 blockscale,,256,4096,4096,20.0,1.0%" + fields,
        "gfx942,MI300X or MI325X,304,gemm,int8/fp8,a8w8 blockscale,,512,4096,4096,,0.0" + fields,
        "gfx1250,,96,gemm,bfloat16,,,128,4096,4096,20.0,0.0" + fields,
        "gfx950,MI350X or MI355X,256,fused_moe,bfloat16,a=float8_e4m3fn w=float4_e2m1fn_x2 per_1x32,,,,,9.0,0,64,4096,256,128,8\n",
    ]
    with gzip.open(tmp_path / "tuned" / aiter.FILE, "wt") as file:
        file.write(AITER + "".join(rows))
    skipped = []
    (table,) = aiter.read(tmp_path, skipped)
    assert table.us == pytest.approx([20.0])
    assert table.ops.m[0] == 128
    told = " ".join(skipped)
    for reason in ("no time", "differs from the right one", "gfx1250 (96 units): no data sheet", "two precisions"):
        assert reason in told
