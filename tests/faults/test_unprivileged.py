"""Verbs as a user without rights: they work where that suffices; what needs root says so in one line."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.processes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.one_core]  # needs root, to give it up


@pytest.fixture
def folder(tmp_path):
    """One that the user owns; skipped where that user cannot run this interpreter or read the package."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("becoming another user needs root and setpriv")
    place = Path("/tmp", f"dpro-search-nobody-{os.getpid()}")
    place.mkdir(mode=0o700)
    user = pwd.getpwnam("nobody")
    os.chown(place, user.pw_uid, user.pw_gid)
    if as_nobody(place, "--version").returncode:
        shutil.rmtree(place)
        pytest.skip("the user nobody cannot read this interpreter or this package")
    yield place
    shutil.rmtree(place)


READS_ALL = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")  # an interpreter that lies in root's home, too


def as_nobody(folder, *args, program=("-m", "dpro_search.cli"), **env):
    user = pwd.getpwnam("nobody")
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--no-new-privs", *READS_ALL]
    known = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder), "NUMBA_CACHE_DIR": str(folder / "numba")}
    known |= env
    command = [*become, sys.executable, *program, *map(str, args)]
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, check=False, timeout=300)


def test_what_needs_no_rights_works(folder):
    for args in (
        ("run", "--trials", 5, "--out", "run"),
        ("export", "run", "--out", "tuned"),
        ("report", "run"),
        ("diagnose",),
        ("doctor",),
    ):
        done = as_nobody(folder, *args)
        assert done.returncode == 0, done.stderr
    assert {"run", "tuned", "report.html"} <= {path.name for path in folder.iterdir()}


def test_what_needs_root_says_so_in_one_line(folder):
    checks = json.loads(as_nobody(folder, "doctor", "--json").stdout)["checks"]
    (hosts,) = [check for check in checks if check["name"] == "shaped hosts"]
    assert not hosts["ok"]
    assert "not root" in hosts["detail"]
    assert "run as root" in hosts["fix"]
    script = "from dpro_search.collect.launch.netns import ShapedHosts\nwith ShapedHosts(2, 1e9): pass"
    done = as_nobody(folder, program=("-c", script))
    assert done.stderr.splitlines()[-1].endswith(
        "MissingCapabilityError: shaped hosts need root (network namespaces); run as root or leave out --rate"
    )


@pytest.mark.parametrize("args", [("import", ROOT / "tests" / "data" / "ddp_mlp", "--out"), ("run", "--trials", 5, "--out")])
def test_a_folder_that_may_not_be_written_is_one_line(folder, args):
    done = as_nobody(folder, *args, "/root-only-dpro-search")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("dpro-search: error: /root-only-dpro-search")
    assert "Permission denied" in done.stderr.splitlines()[-1]


def test_neither_home_nor_the_package_can_be_written(folder):
    """As in a container that runs as a user of its own: numba's cache goes into a private folder."""
    package = folder.with_name(f"{folder.name}-package")
    shutil.copytree(ROOT / "dpro_search", package / "dpro_search", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    places = {"PYTHONPATH": str(package), "HOME": "/nonexistent", "NUMBA_CACHE_DIR": "", "TMPDIR": str(folder / "tmp")}
    try:
        for args in (("replay",), ("run", "--trials", 5, "--out", "run"), ("report", "run"), ("samples",)):
            done = as_nobody(folder, *args, **places)
            assert done.returncode == 0, done.stderr
        kept = folder / "tmp" / f"dpro-search-numba-{pwd.getpwnam('nobody').pw_uid}"
        assert kept.stat().st_mode & 0o777 == 0o700
        assert list(kept.rglob("*.nbc"))
    finally:
        shutil.rmtree(package)
