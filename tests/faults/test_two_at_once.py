"""Two searches that are given one folder at the same moment."""

import subprocess

from tests.faults.processes import SEARCH, command, shown
from tests.in_process import succeeds


def test_one_of_two_searches_in_a_folder_is_refused_and_the_other_is_as_if_it_were_alone(tmp_path):
    args = command(*SEARCH, 60, "--out", "both")
    both = [subprocess.Popen(args, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 0], [0, 2]), errors  # both end well where one was done before the other began
    assert all("another search is writing it" in error for error, process in zip(errors, both, strict=True) if process.returncode)
    succeeds(*SEARCH, 60, "--out", "alone", cwd=tmp_path)
    assert (tmp_path / "both" / "trials.jsonl").read_bytes() == (tmp_path / "alone" / "trials.jsonl").read_bytes()
    assert shown(tmp_path / "both") == shown(tmp_path / "alone")
