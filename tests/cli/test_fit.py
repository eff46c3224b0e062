"""`dpro-search fit`, as a process."""

import json

import pytest

from dpro_search.costmodel.fused.model_file import FusionModel
from tests.in_process import dpro
from tests.recordings import FEW_CLUSTERS as TABLE


def fit(*arguments):
    return dpro("fit", *arguments)


def test_training_prints_one_json_object_and_writes_a_model(tmp_path):
    done = fit(TABLE, "--out", tmp_path / "model", "--json")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["models"]
    assert {"name", "rows", "mape_pct", "coverage"} <= set(entry)
    loaded = FusionModel.load(tmp_path / "model")
    assert (entry["name"], entry["rows"], entry["mape_pct"]) == (loaded.info.name, loaded.info.rows, loaded.info.overall.mape_pct)


def test_people_get_a_table_of_scores_per_left_out_model(tmp_path):
    done = fit(TABLE, "--out", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    for word in ("left out", "bert", "resnet50", "all", "0.8 sum", "never", "without shapes"):
        assert word in done.stdout


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "text.jsonl").write_text("no table\n")
    for arguments in (
        (tmp_path / "missing.jsonl", "--out", tmp_path / "m"),
        (tmp_path / "text.jsonl", "--out", tmp_path / "m"),
        (tmp_path, "--out", tmp_path / "m"),
        (TABLE, "--out", tmp_path),
        (TABLE, "--collect", "xla", "--out", tmp_path / "t"),
    ):
        done = fit(*arguments)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "m").exists()


def test_collecting_without_an_interpreter_says_how_to_get_one(tmp_path):
    done = fit("--collect", "xla", "--out", tmp_path / "t.jsonl", "--python", tmp_path / "nothing")
    assert done.returncode == 1
    assert "make_env.sh" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--collect", "device", "--name", "h100-sxm"), "--name h100-sxm: is bundled; choose another, like my-h100-sxm"),
        (("--collect", "device", "--name", "my/gpu"), "use letters, digits, dots and hyphens"),
        (("--collect", "device", "--out", "device.json"), "a device is a file whose name ends in .toml"),
        (("--collect", "device", "--specs", "no-such"), "no device is called 'no-such'"),
        (("--collect", "xla"), "Missing option '--out'"),
        ((), "Missing option '--out'"),
    ],
)
def test_what_a_device_or_an_output_may_not_be_is_named(options, message, tmp_path):
    done = fit(*options)
    assert done.returncode == 2
    assert message in done.stderr
