"""Devices that a user added: their files, with the ops that were measured, and their names."""

from pathlib import Path

import msgspec
import pytest

from dpro_search.cluster import Cluster, Sample, bundled, device_toml, parse_cluster, to_toml
from dpro_search.cluster.files import load_device
from dpro_search.errors import InputError

SAMPLES = (Sample("gemm bf16 m=4096 n=4096 k=4096", 610.5, 1.5), Sample("copy fp32 rows=1024 length=4096", 21.0, 0.0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("DPRO_SEARCH_DEVICES", str(tmp_path))
    return tmp_path


def measured():
    return msgspec.structs.replace(bundled.device("h100-sxm"), samples=SAMPLES)


def test_a_device_with_samples_is_read_back_as_it_was_written(folder):
    (folder / "mine.toml").write_text(device_toml(measured(), machine="hgx-h100"))
    assert load_device(folder / "mine.toml", bundled.find) == measured()


def test_devices_are_named_like_bundled_ones_and_fill_hosts_of_their_usual_machine(folder):
    (folder / "my-h100.toml").write_text(device_toml(measured(), machine="hgx-h100"))
    four, sixteen = parse_cluster("4xMy H100"), parse_cluster("16xmy-h100")
    assert (four.ranks, sixteen.hosts) == (4, 2)
    assert four.devices[0] == measured()
    assert four.level_between(0, 1) == parse_cluster("hgx-h100").level_between(0, 1)


def test_a_cluster_file_names_a_device_of_the_user(folder):
    (folder / "my-h100.toml").write_text(device_toml(measured()))
    path = folder / "cluster" / "two.toml"
    path.parent.mkdir()
    path.write_text('base = "hgx-h100"\ndevice = "my-h100"\nhosts = 2\n')
    assert set(parse_cluster(str(path)).devices) == {measured()}


def test_a_cluster_keeps_the_samples_of_its_devices_as_text_and_as_json(tmp_path):
    cluster = parse_cluster("hgx-h100")
    host = msgspec.structs.replace(cluster.groups[0].host, device=measured())
    cluster = msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(cluster.groups[0], host=host),))
    (tmp_path / "it.toml").write_text(to_toml(cluster))
    assert parse_cluster(str(tmp_path / "it.toml")).devices[0].samples == SAMPLES
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


def test_an_unknown_name_lists_the_devices_of_the_user(folder):
    (folder / "my-accelerator.toml").write_text(device_toml(measured()))
    with pytest.raises(InputError, match="did you mean my-accelerator"):
        parse_cluster("4xmy-acelerator")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ("samples = 3", r"mine.toml:2: samples: must be a list, not 3"),
        ('samples = [["gemm", 1, 2, 3]]', r"samples\[0\]: must be a list of 3 values, not of 4"),
        ('samples = [["gemm", -1]]', r"samples\[0\]\[1\]: .-1. is not a time"),
        ('samples = [["gemm", "soon"]]', r"samples\[0\]\[1\]: .soon. is not a time"),
        ('samples = [["gemm", true]]', "must be a quantity, like a text with a unit, not True"),
    ],
)
def test_samples_that_are_none_are_named(tmp_path, samples, message):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "h100-sxm"\n{samples}\n')
    with pytest.raises(InputError, match=message):
        load_device(path, bundled.find)


def test_a_time_may_have_a_unit(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "h100-sxm"\nsamples = [["copy fp32 rows=1 length=64", "0.002ms"]]\n')
    assert load_device(path, bundled.find).samples == (Sample("copy fp32 rows=1 length=64", 2.0),)
