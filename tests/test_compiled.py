"""Compiled functions where numba may write to none of its usual folders, as in a container that runs as another user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search._compiled import private_folder

NAME = f"dpro-search-numba-{os.getuid()}"
MODULE = "from dpro_search._compiled import njit\n\n@njit()\ndef doubled(x):\n    return 2 * x\n\nprint(doubled(4))\n"


@pytest.fixture
def temporary(tmp_path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o700)
    return folder


def printed(folder: Path, temporary: Path) -> str:
    """Output of a module with a compiled function, run where numba has no folder of its own."""
    (folder / "module.py").write_text(MODULE)
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator", "NUMBA_CACHE_DIR": "", "TMPDIR": str(temporary)}
    command = [sys.executable, str(folder / "module.py")]
    done = subprocess.run(command, env={**os.environ, **nowhere}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_the_code_goes_to_a_private_folder(tmp_path, temporary):
    assert printed(tmp_path, temporary) == "8\n"
    assert (temporary / NAME).stat().st_mode & 0o777 == 0o700
    assert list((temporary / NAME).rglob("*.nbc"))


def test_without_a_private_folder_nothing_is_kept(tmp_path, temporary):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (temporary / NAME).symlink_to(elsewhere)  # as another user may plant it
    assert printed(tmp_path, temporary) == "8\n"
    assert list(elsewhere.iterdir()) == []


class TestPrivateFolder:
    @pytest.fixture(autouse=True)
    def _at_a_temporary_place(self, temporary, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        private_folder.cache_clear()

    def test_it_is_made_or_used_again(self, temporary):
        assert private_folder("a") == temporary / "a"
        private_folder.cache_clear()
        assert private_folder("a") == temporary / "a"

    def test_one_that_others_may_read_is_not_used(self, temporary):
        (temporary / "a").mkdir()
        (temporary / "a").chmod(0o755)
        assert private_folder("a") is None

    def test_where_others_may_rename_it_there_is_none(self, temporary):
        temporary.chmod(0o777)
        assert private_folder("a") is None
        temporary.chmod(0o1777)
        assert private_folder("b") == temporary / "b"

    @pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
    def test_one_of_another_user_is_not_used(self, temporary):
        (temporary / "a").mkdir(mode=0o700)
        os.chown(temporary / "a", 65534, 65534)
        assert private_folder("a") is None

    def test_a_file_in_its_place_is_not_used(self, temporary):
        (temporary / "a").write_text("")
        assert private_folder("a") is None
