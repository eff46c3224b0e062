"""Formats are told by content; what is not known is said in one line."""

import gzip
import os
import threading

import pytest
from importer_kit import check_trace
from kineto_files import distributed, small_job

from dpro_search.collect.readers.importers import import_trace, importers
from dpro_search.errors import InputError
from tests.every_case import every_case


def message(*sources) -> str:
    with pytest.raises(InputError) as raised:
        import_trace(list(sources))
    (line,) = str(raised.value).splitlines()
    return line


def test_every_format_says_what_it_looks_for_and_has_a_name_of_its_own():
    known = importers()
    assert len({importer.name for importer in known}) == len(known)
    assert all(importer.description for importer in known)


def test_a_file_of_no_known_format_is_named_with_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("loss went down")
    line = message(tmp_path / "notes.txt")
    assert str(tmp_path / "notes.txt") in line
    assert "looked for a folder of dpro_search.record, a Kineto profile" in line


def test_an_empty_file_and_an_empty_folder(tmp_path):
    (tmp_path / "none.json").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert "none.json: empty" in message(tmp_path / "none.json")
    assert "has no files" in message(tmp_path / "folder")


def test_a_file_that_does_not_exist(tmp_path):
    assert "cannot be read" in message(tmp_path / "gone.json")


def test_a_folder_may_hold_other_files_which_are_counted(tmp_path):
    small_job().write(tmp_path / "trace.json")
    (tmp_path / "LICENSE").write_text("MIT")
    (tmp_path / ".hidden").write_text("x")
    trace = import_trace([tmp_path])
    assert trace.meta.dropped["files of another format or none"] == 1
    assert any(warning.endswith(f"was left out: {tmp_path / 'LICENSE'}") for warning in trace.meta.warnings)
    (tmp_path / "NOTES").write_text("of the run")
    assert any(warning.startswith("2 files, none of them a Kineto profile") for warning in import_trace([tmp_path]).meta.warnings)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bx", b"not a profile"])
@pytest.mark.parametrize("names", ["rank0.json rank1.json", "rank0/kineto.json rank1/kineto.json"])
def test_a_damaged_rank_in_a_folder_does_not_make_a_smaller_job(tmp_path, names, content):
    good, bad = (tmp_path / name for name in names.split())
    for path in (good, bad):
        path.parent.mkdir(exist_ok=True)
        small_job().write(path)
    bad.write_bytes(content)
    assert message(tmp_path).startswith(f"{bad}: of no known format, empty or damaged, but named as {good.name} of the same job")


def test_a_link_that_leads_nowhere_or_in_a_loop_is_an_error(tmp_path):
    small_job().write(tmp_path / "rank0.json")
    for target in ("gone.json", "rank1.json"):
        (tmp_path / "rank1.json").symlink_to(tmp_path / target)
        for sources in ([tmp_path], [tmp_path / "rank0.json", tmp_path / "rank1.json"]):
            assert message(*sources).startswith(f"{tmp_path / 'rank1.json'}: cannot be read (")
        (tmp_path / "rank1.json").unlink()


def test_a_pipe_is_read_like_a_file(tmp_path):
    profile = small_job().write(tmp_path / "trace.json")
    assert len(from_pipe(tmp_path, profile.read_bytes()).events) == len(import_trace([profile]).events)


def test_a_pipe_of_no_format_is_named_as_the_user_named_it(tmp_path):
    with pytest.raises(InputError, match=rf"^{tmp_path / 'pipe'}: of no known format"):
        from_pipe(tmp_path, b"nothing")


def from_pipe(folder, content):
    os.mkfifo(folder / "pipe")
    writer = threading.Thread(target=(folder / "pipe").write_bytes, args=(content,))
    writer.start()
    try:
        return import_trace([folder / "pipe"])
    finally:
        writer.join()


def test_a_file_that_was_named_must_be_of_the_job(tmp_path):
    profile = small_job().write(tmp_path / "trace.json")
    (tmp_path / "LICENSE").write_text("MIT")
    assert f"{tmp_path / 'LICENSE'}: of no known format, but {profile} is a Kineto profile" in message(
        profile, tmp_path / "LICENSE"
    )


def test_a_file_that_is_given_twice_counts_once(tmp_path):
    profile = small_job().write(tmp_path / "trace.json")
    (tmp_path / "link.json").symlink_to(profile)
    assert import_trace([profile, profile, tmp_path / "link.json", tmp_path]).meta.ranks == 1


def test_compressed_files_are_recognised_whatever_their_name(tmp_path):
    plain = small_job().write(tmp_path / "rank0.json", header=distributed(0, 2))
    other = small_job().write(tmp_path / "rank1.json", header=distributed(1, 2))
    other.write_bytes(gzip.compress(other.read_bytes()))
    trace = import_trace([plain, other])
    check_trace(trace)
    assert trace.meta.ranks == 2


@every_case(
    ("name", "data", "what"),
    [
        ("run.zip", b"PK\x03\x04" + bytes(100), "a zip archive; unpack it"),
        ("trace.npz", b"PK\x03\x04" + bytes(100), "give the folder to replay"),
        ("run.tar", bytes(257) + b"ustar" + bytes(100), "a tar archive; unpack it"),
        ("run.tgz", gzip.compress(bytes(257) + b"ustar" + bytes(100), mtime=0), "a tar archive; unpack it"),
        ("report.sqlite", b"SQLite format 3\0" + bytes(100), "a report of Nsight Systems"),
        ("report.nsys-rep", b"anything", "a report of Nsight Systems"),
        ("et.json", b'{"schema": "1.0.2-chakra.0.0.4", "nodes": []}', "convert it to protobuf"),
        ("old.json", b'[{"name":"add","ph":"X","ts":1,"dur":1,"tid":1,"pid":"CPU functions"}]', "torch.autograd.profiler"),
        ("page.json", b"<!DOCTYPE html><html></html>", "a web page"),
        ("snapshot.pickle", b"\x80\x04\x95" + bytes(20), "a pickle, which is not opened"),
    ],
)
def test_files_that_people_try_are_named_with_what_to_do(name, data, what, tmp_path):
    (tmp_path / name).write_bytes(data)
    line = message(tmp_path / name)
    assert line.startswith(f"{tmp_path / name}: ")
    assert what in line
    assert len(line) < len(str(tmp_path)) + 250
