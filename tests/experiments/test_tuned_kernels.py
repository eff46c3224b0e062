"""Tables of tuned kernels: what is no latency is left out, and devices that were left out are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpro_search.costmodel.programs.kernel import Memory
from dpro_search.errors import InputError
from experiments.tensor_programs.kernels.__main__ import means
from experiments.tensor_programs.kernels.front_ends import convolution, gemm
from experiments.tensor_programs.kernels.score import best_of, score
from experiments.tensor_programs.kernels.tables import read

TUNED = Path(__file__).resolve().parents[2].parent / "shared" / "devices" / "tuned"
HEADER = "kernel,device,block_size_x,tile_size_x,time_ms_median,status\n"


def table(folder: Path, *rows: str) -> Path:
    (folder / "kernels.csv").write_text(HEADER + "".join(f"mine,{row}\n" for row in rows))
    return folder


def test_configurations_that_failed_have_no_latency(tmp_path: Path) -> None:
    folder = table(tmp_path, "A100,32,1,2.5,ok", "A100,64,1,9.0,RuntimeFailedConfig", "L4,32,1,5.0,ok", "L4,64,1,3.0,ok")
    (one,) = read(folder, [])
    assert one.devices == ("A100", "L4")
    assert np.isnan(one.us).tolist() == [[False, False], [True, False]]
    assert "1 configurations failed to compile or to run" in one.remarks[0]
    assert "1 of 2 programs have times on all devices (A100 1, L4 2)" in one.remarks[1]


def test_times_in_other_units_are_named(tmp_path: Path) -> None:
    times = {"A100": 1, "L4": 2, "T4": 0.003}
    rows = [f"{device},{block},1,{time * block},ok" for device, time in times.items() for block in (32, 64)]
    (one,) = read(table(tmp_path, *rows), [])
    assert any(remark.startswith("T4: times are") and "other units" in remark for remark in one.remarks)


def test_a_folder_without_tables_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    skipped: list[str] = []
    with pytest.raises(InputError, match="no table of tuned kernels"):
        read(tmp_path, skipped)
    assert skipped[0].startswith("notes.csv")


def test_a_convolution_that_covers_its_image_has_no_conditions() -> None:
    blocks = {"block_size_x": 32, "block_size_y": 4, "tile_size_x": 2, "tile_size_y": 2}
    values = blocks | {"read_only": 0, "use_padding": 0, "use_shmem": 1}
    exact, beyond = convolution(values), convolution(values | {"tile_size_x": 3})
    assert (exact.needed, any(leaf.guarded for leaf in exact.leaves)) == (1.0, False)
    assert beyond.needed < 1
    assert any(leaf.guarded for leaf in beyond.leaves)
    assert exact.shared_bytes == 4 * (32 * 2 + 14) * (4 * 2 + 14)
    assert exact.heaviest.iterations == (4096 * 15) ** 2


def test_a_product_reads_operands_from_shared_memory_where_it_is_told_to() -> None:
    values = {"MWG": 64, "NWG": 64, "KWG": 32, "MDIMC": 16, "NDIMC": 16, "MDIMA": 16, "NDIMB": 16, "KWI": 2, "VWM": 2, "VWN": 2}
    program = gemm(values | {"SA": 1, "SB": 0})
    assert [access.memory for access in program.heaviest.accesses[1:]] == [Memory.SHARED, Memory.GLOBAL]
    assert program.shared_bytes == 4 * 64 * 32
    assert program.heaviest.iterations == 4096**3


def test_the_best_of_some_programs_counts_what_a_tuner_would_lose() -> None:
    us = np.arange(1.0, 101.0)
    assert best_of(np.array([40, 20, 60]), us) == pytest.approx(100 * 20.0)


@pytest.mark.skipif(not TUNED.is_dir(), reason="measured kernels are not here")
def test_an_a6000_is_predicted_from_four_other_gpus_and_fifty_programs() -> None:
    (convolutions,) = (one for one in read(TUNED, []) if one.kernel == "convolution_milo")
    result = score(convolutions, "A6000", 0, budgets=(0, 50), compare=False)
    assert result["50 measured"]["mape_pct"] < 12
    assert result["50 measured"]["in_interval_pct"] > 80
    assert result["0 measured: order"]["tau"] > 0.7


def test_means_are_over_seeds_then_devices_then_kernels() -> None:
    rows = {f"one/A/{seed}": {"x": {"mape_pct": value}} for seed, value in enumerate((1.0, 3.0))}
    rows |= {"one/B/0": {"x": {"mape_pct": 4.0}}, "two/A/0": {"x": {"mape_pct": 7.0}}}
    averaged = means(rows)
    assert averaged["one"]["x"]["mape_pct"] == 3.0
    assert averaged["all kernels"]["x"]["mape_pct"] == 5.0
    json.dumps(averaged)


def test_devices_of_a_kernel_may_come_from_several_files(tmp_path: Path) -> None:
    table(tmp_path, "A100,32,1,2.5,ok", "A100,64,1,3.0,ok")
    (tmp_path / "later.csv").write_text(HEADER + "mine,W7800,32,1,5.0,ok\n")
    (tmp_path / "other.csv").write_text("kernel,device,tile,time_ms_mean\nmine,L4,1,2.0\n")
    skipped: list[str] = []
    (one,) = read(tmp_path, skipped)
    assert one.devices == ("A100", "W7800")
    assert "1 files have other parameters" in skipped[0]
