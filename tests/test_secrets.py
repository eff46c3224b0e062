"""Secrets in the command of a training job are not shown, and files that need them are readable by their owner only."""

import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from dpro_search._text import text_without_secrets, without_secrets
from dpro_search.collect.launch.ranks import log_tail
from dpro_search.collect.trace import Trace
from tests.in_process import dpro, succeeds
from tests.sample import horovod_trace_path

SECRET = "s3cr3t"
COMMAND = (
    "env", f"HF_TOKEN={SECRET}", "python", "train.py", "--api-key", SECRET, f"--token={SECRET}", "--wandb_password", SECRET,
    f"wandb.api_key={SECRET}", f"--storage=postgres://me:{SECRET}@host/db", "--lr", "0.1",
)  # fmt: skip


def test_values_of_options_and_variables_are_masked():
    assert without_secrets(COMMAND) == [
        "env", "HF_TOKEN=***", "python", "train.py", "--api-key", "***", "--token=***", "--wandb_password", "***",
        "wandb.api_key=***", "--storage=postgres://me:***@host/db", "--lr", "0.1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", f"HF_TOKEN={SECRET} python train.py --api-key {SECRET} --lr 1"],
        ["python", "t.py", f'{{"secret": "{SECRET}", "a": 1}}'],
        ["python", "t.py", "-password", SECRET],
        ["python", "t.py", f"--AUTH-TOKEN='{SECRET} {SECRET}'"],
    ],
)
def test_they_are_masked_wherever_they_stand(words):
    assert SECRET not in " ".join(without_secrets(words))


def test_other_words_stay():
    words = ["python", "train.py", "--use-auth-token", "--tokens", "8192", "--keys=4", "--monkeys", "3", "a=b", "http://host:80/x"]
    assert without_secrets(words) == words
    assert text_without_secrets("the key is 5, a token of 3: none") == "the key is 5, a token of 3: none"


@pytest.fixture
def trace(tmp_path) -> Path:
    """A trace of a job whose command holds secrets."""
    sample = Trace.load(horovod_trace_path())
    changed = Trace(**{**vars(sample), "meta": msgspec.structs.replace(sample.meta, command=COMMAND)})
    changed.save(tmp_path / "trace")
    return tmp_path / "trace"


def test_a_trace_that_needs_them_is_its_owners(trace, tmp_path):
    assert Trace.load(trace).meta.command == COMMAND  # to run the job again
    assert stat.S_IMODE((trace / "meta.json").stat().st_mode) == 0o600
    Trace.load(horovod_trace_path()).save(tmp_path / "plain")
    assert stat.S_IMODE((tmp_path / "plain" / "meta.json").stat().st_mode) & 0o077


def test_what_is_shown_or_shared_has_none(trace, tmp_path):
    succeeds("run", trace, "--trials", 5, "--sampler", "mcmc", "--out", tmp_path / "run")
    succeeds("report", trace, "--out", tmp_path / "trace.html")
    succeeds("report", tmp_path / "run", "--out", tmp_path / "run.html")
    succeeds("export", tmp_path / "run", "--out", tmp_path / "tuned")
    refused = dpro("validate", tmp_path / "run")
    assert "--api-key '***'" in refused.stderr
    shown = [succeeds("doctor", trace), succeeds("doctor", trace, "--json"), succeeds("replay", trace, "--json"), refused.stderr]
    shutil.rmtree(trace)
    written = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert not [text for text in (*shown, *written) if SECRET in text]
    assert any("--api-key" in text for text in written)


def test_an_error_that_quotes_a_log_has_none(tmp_path):
    (tmp_path / "log").write_text(f"train.py: error: unrecognized arguments: --api-key {SECRET}\n")
    assert log_tail(tmp_path / "log") == "train.py: error: unrecognized arguments: --api-key ***"
