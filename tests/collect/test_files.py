"""Temporary folders end with their process, also with one that was killed."""

import signal
import subprocess
import sys

from dpro_search.collect._files import scratch_folder

HOLD = "import sys, time\nfrom dpro_search.collect._files import scratch_folder\n"
HOLD += "with scratch_folder('test') as folder:\n    (folder / 'x').touch()\n    print(folder, flush=True)\n    time.sleep(600)\n"


def test_a_folder_is_removed_when_the_block_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_folder("test") as folder:
        (folder / "rank0").mkdir()
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_another_uses_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    stranger = tmp_path / "dpro-search-test-of-somebody"
    stranger.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as holder:
        used = tmp_path / holder.stdout.readline().strip()
        with scratch_folder("test") as scratch:
            assert set(tmp_path.iterdir()) == {used, scratch, stranger}
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert used.is_dir()
    with scratch_folder("test") as scratch:
        assert set(tmp_path.iterdir()) == {scratch, stranger}
