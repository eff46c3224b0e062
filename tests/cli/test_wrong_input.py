"""Errors of wrong input: one line that says what is wrong, and what to do."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from sample import sample

import dpro_search
from dpro_search.cli import main
from dpro_search.collect.assemble.torch.job import assemble_torch
from tests.sample import horovod_trace_path

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a verb can be given by mistake: a trace, a search, a plan, raw files, an empty folder."""
    path = tmp_path_factory.mktemp("inputs")
    shutil.copytree(horovod_trace_path(), path / "trace")
    shutil.copytree(DATA / "ddp_mlp", path / "raw")
    meta = msgspec.structs.replace(sample().meta, machine="another")
    replace(sample(), meta=meta).save(path / "other")
    assemble_torch(DATA / "fsdp_mlp").save(path / "sharded")
    dpro_search.load(path / "trace").search(trials=2, sampler="mcmc", out=path / "search")
    (path / "empty").mkdir()
    return path


def line(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The error of a command that must exit with 2."""
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    assert ended.value.code == 2
    (text,) = capsys.readouterr().err.splitlines()
    return text


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("replay empty", "not a trace folder, but an empty folder; make one with 'dpro-search collect' or 'import'"),
        ("replay search", "not a trace folder, but the folder of a search"),
        ("run search", "not a trace folder, but the folder of a search"),
        ("run raw", "but the raw files of a recorded job, of which 'dpro-search import' makes a trace"),
        ("diagnose search/plans/plan-1.json", "not a trace folder, but a file"),
        ("replay nowhere", "but no such file or folder"),
        ("run other --sampler mcmc --trials 3 --out search", "search: a search of another trace"),
        ("import trace --out t", "trace: a trace, and no raw files; 'replay' and 'run' take a trace"),
        ("import search --out t", "search: the folder of a search, and no raw files"),
        ("import empty --out t", "empty: the folder has no files"),
        ("validate trace -- python train.py", "trace: not the folder of a search, but a trace; make one with 'dpro-search run'"),
        ("validate nowhere -- python train.py", "not the folder of a search, but no such file or folder"),
        ("export trace --out t", "trace: a trace, not the folder of a search; search with 'dpro-search run TRACE --out RUN'"),
        ("export empty --out t", "an empty folder, not the folder of a search"),
        (
            "export search --target ddp --out t",
            "--target ddp: the recorded job is tensorflow with horovod, whose plans are followed by",
        ),
        ("report search --out empty", "is a folder; name a file, like empty/report.html"),
        ("collect --out t python train.py --epochs 3", "follow '--', like '-- python train.py --epochs 3'"),
        ("validate search python train.py --epochs 3", "follow '--', like '-- python train.py --epochs 3'"),
        ("replay trace --perfetto .", ".: a folder; name a file to write"),
        ("replay trace --timeline empty", "empty: a folder; name a file to write"),
        ("replay trace --what-if compute", "'compute': no value; write compute=VALUE"),
        ("replay trace --set bandwith=2", "did you mean bandwidth?"),
        ("replay trace --set cycle_time_us=64MB", "'64MB' is not a time: write it like 10ms, 500us or 2s"),
        ("replay trace --holdout-step 2", "step 2 was not profiled; choose a step from 13 to 22"),
        ("run sharded --with recomputation --out t", "its plans change prefetch, reshard_after_forward"),
    ],
)
def test_an_error_says_what_is_wrong_and_what_to_do(command, said, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert said in line(capsys, *command.split())
    assert not (folder / "t").exists()


def test_a_plan_whose_memory_is_not_known_keeps_no_limit(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit):
        main(["run", "sharded", "--trials", "4", "--sampler", "mcmc", "--memory-limit", str(2**20), "--out", "limited"])
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"No plan keeps the memory limit. The plan with the least memory needs 30\d\.\d MiB", printed)
