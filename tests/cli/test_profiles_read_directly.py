"""Verbs read a profile as it is: it is imported once, into a cache that all of them share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kineto_machine import Launch, Synchronize, run

from tests.in_process import dpro


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return run([Launch("gemm", 10, 400), Launch("relu", 10, 100), Synchronize(50)], 6)[0].write(tmp_path / "rank0.json.gz")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_profile_is_imported_once_and_every_verb_says_where_its_trace_is(profile: Path, cache: Path, tmp_path: Path) -> None:
    for verb, *rest in (("replay",), ("diagnose",), ("diff", profile), ("report", "--out", tmp_path / "r.html")):
        done = dpro(verb, profile, *rest)
        assert done.returncode == 0, done.stderr
        (folder,) = (cache / "dpro-search" / "imported").iterdir()
        assert str(folder) in done.stderr
    assert "imported before" in done.stderr


def test_the_answer_is_that_of_the_imported_trace(profile: Path, cache: Path, tmp_path: Path) -> None:
    assert dpro("import", profile, "--out", tmp_path / "T").returncode == 0
    direct, imported = (json.loads(dpro("replay", source, "--json").stdout) for source in (profile, tmp_path / "T"))
    assert direct["predicted_iteration_us"] == imported["predicted_iteration_us"]


def test_a_folder_of_profiles_is_read_and_another_content_is_another_trace(profile: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    profile.rename(folder / "rank0.json.gz")
    assert dpro("replay", folder).returncode == 0
    run([Launch("gemm", 10, 900), Synchronize(50)], 6)[0].write(folder / "rank0.json.gz")
    assert dpro("replay", folder).returncode == 0
    assert len(list((cache / "dpro-search" / "imported").iterdir())) == 2


def test_where_the_home_cannot_be_written_a_folder_of_the_user_takes_the_trace(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    assert dpro("replay", profile).returncode == 0


def test_what_import_does_not_read_is_refused_as_before(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "notes.txt").write_text("no profile")
    done = dpro("replay", tmp_path / "notes.txt")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not cache.exists()
