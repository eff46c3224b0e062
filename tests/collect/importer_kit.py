"""What every importer must stand: subclass `ImporterConformance`, give it real files, and it is tested.

class TestKineto(ImporterConformance):
    importer = kineto.IMPORTER

    @pytest.fixture
    def files(self, tmp_path): return [a real file, or one that the test writes, ...]
"""

import gzip
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.readers.importers import Importer, import_trace, importers, read_head
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.collect.trace_check import check
from dpro_search.errors import DproSearchError

FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def plain(path: Path) -> bytes:
    """A file's content, decompressed where it is gzip."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw


def shared_traces() -> Path:
    """Real traces beside the repository; the test is skipped where there are none."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "traces"
    if not folder.is_dir():
        pytest.skip("real traces are not beside the repository (shared/traces)")
    return folder


def check_trace(trace: Trace) -> None:
    """What holds of any trace: columns of one length, indices in range, times in order, ranks and steps as `meta` says."""
    events, count = trace.events, len(trace.events)
    assert all(len(getattr(events, name)) == count for name in events.__dataclass_fields__)
    assert np.isfinite(events.start_us).all()
    assert (events.end_us >= events.start_us).all()
    assert set(np.unique(events.kind)) <= set(EventKind)
    if count:
        assert 0 <= events.name.min() <= events.name.max() < len(trace.names)
        assert -1 <= events.tensor.min() <= events.tensor.max() < max(len(trace.tensors), 1)
        assert events.rank.min() >= 0
    needs = trace.dependencies
    for end in (needs.source, needs.target):
        assert len(end) == len(needs.kind)
        assert not len(end) or 0 <= end.min() <= end.max() < count
    assert len(trace.meta.hosts) == len(trace.meta.clock.offset_us) == len(trace.meta.clock.residual_us) == trace.meta.ranks
    assert all(number > 0 for number in trace.meta.dropped.values())
    check(trace)


def read_or_one_line(importer: Importer, paths: list[Path]) -> Trace | str:
    """The trace, checked, or the message of the error, which is one line and names a file."""
    try:
        trace = importer.read(paths)
    except DproSearchError as error:
        message = str(error)
        assert "\n" not in message
        assert any(str(path) in message for path in paths), message
        return message
    check_trace(trace)
    return trace


class ImporterConformance:
    """Tests of one importer; a subclass sets `importer` and the fixture `files`: the files of one small job, companions too."""

    importer: Importer

    @pytest.fixture
    def files(self, tmp_path: Path) -> list[Path]:
        raise NotImplementedError

    def owned(self, files: list[Path]) -> Path:
        """The first file that the importer recognises."""
        return next(path for path in files if self.importer.recognise(read_head(path), path))

    def damaged(self, files: list[Path], folder: Path, data: bytes) -> list[Path]:
        """The same files in a new folder, the first one that the importer owns with other content."""
        folder.mkdir(exist_ok=True)
        copies = [folder / path.name for path in files]
        for path, copy in zip(files, copies, strict=True):
            shutil.copyfile(path, copy)
        copies[files.index(self.owned(files))].write_bytes(data)
        return copies

    def test_reads_its_files(self, files):
        trace = self.importer.read(sorted(files))
        check_trace(trace)
        assert len(trace.events)
        assert trace.meta.format == self.importer.name

    def test_only_it_recognises_its_files(self, files):
        path = self.owned(files)
        head = read_head(path)
        assert next(other.name for other in importers() if other.recognise(head, path)) == self.importer.name

    def test_names_and_compression_do_not_matter(self, files, tmp_path):
        path = self.owned(files)
        (tmp_path / "zipped").mkdir()
        renamed = self.damaged(files, tmp_path / "zipped", gzip.compress(plain(path)))
        check_trace(import_trace(renamed))
        other = renamed[files.index(path)].rename(tmp_path / "zipped" / "x")
        assert self.importer.recognise(read_head(other), other)

    def test_a_trace_of_it_can_be_saved_and_loaded(self, files, tmp_path):
        trace = self.importer.read(sorted(files))
        trace.save(tmp_path / "saved")
        assert len(Trace.load(tmp_path / "saved").events) == len(trace.events)

    @pytest.mark.parametrize(
        "data", [b"", b"\x1f\x8b", b"[", b"{}", b"[]", b'{"traceEvents": 1}', b'[{"ph": []}]', b"\xff\xfe{}", b"null"]
    )
    def test_what_is_not_its_format_is_one_line_or_nothing(self, files, tmp_path, data):
        read_or_one_line(self.importer, self.damaged(files, tmp_path / "bad", data))

    def test_a_compressed_file_that_ends_in_the_middle(self, files, tmp_path):
        whole = gzip.compress(plain(self.owned(files)))
        read_or_one_line(self.importer, self.damaged(files, tmp_path / "cut", whole[: len(whole) // 2]))

    @FUZZ
    @given(share=st.floats(0, 1))
    def test_a_file_may_be_cut_anywhere(self, files, tmp_path_factory, share):
        data = plain(self.owned(files))
        read_or_one_line(self.importer, self.damaged(files, tmp_path_factory.mktemp("cut"), data[: int(len(data) * share)]))

    @FUZZ
    @given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 200))
    def test_bytes_may_be_wrong(self, files, tmp_path_factory, seed, flips):
        data = np.frombuffer(plain(self.owned(files)), np.uint8).copy()
        rng = np.random.default_rng(seed)
        data[rng.integers(0, len(data), flips)] = rng.integers(0, 256, flips)
        read_or_one_line(self.importer, self.damaged(files, tmp_path_factory.mktemp("flipped"), data.tobytes()))

    @FUZZ
    @given(data=st.binary(max_size=2000))
    def test_random_bytes(self, files, tmp_path_factory, data):
        read_or_one_line(self.importer, self.damaged(files, tmp_path_factory.mktemp("random"), data))
        for head in (data, zlib.compress(data)):
            assert self.importer.recognise(head, Path("x")) in (True, False)
