"""What every importer must stand: subclass `ImporterConformance`, give it real files, and it is tested.

class TestKineto(ImporterConformance):
    importer = kineto.IMPORTER

    @pytest.fixture
    def files(self, tmp_path): return [a real file, or one that the test writes, ...]
"""

import gzip
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.readers._salvage import loss_warnings
from dpro_search.collect.readers.importers import Importer, import_trace, importers, read_head
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.collect.trace_check import check
from dpro_search.errors import DproSearchError
from tests.recordings import imported

SEEDS = 12  # of each kind of damage, for each format; `benchmarks/faults.md` has campaigns of hundreds
MOST_CPU_S = 20  # of one small file, on the slowest machine: the work grows as the file
Damage = Callable[[bytes, np.random.Generator], bytes]
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


def shared_trace(*names: str) -> Trace:
    """The trace of real files, which is imported once for all tests of a process."""
    return imported(*(shared_traces() / name for name in names))


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


def _one_byte(data: bytes, rng: np.random.Generator) -> bytes:
    return _bytes(data, rng, 1)


def _many_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    return _bytes(data, rng, int(rng.integers(2, 200)))


def _bytes(data: bytes, rng: np.random.Generator, count: int) -> bytes:
    changed_copy = np.frombuffer(data, np.uint8).copy()
    changed_copy[rng.integers(0, len(changed_copy), count)] = rng.integers(0, 256, count)
    return changed_copy.tobytes()


def _mark(data: bytes, rng: np.random.Generator) -> bytes:
    """A byte that the format gives a meaning, in the place of another of them."""
    marks = b'{}[]",:\\\n0\x00\x08\x0a\x12\xff'
    places = [place for place in rng.permutation(len(data))[:500].tolist() if data[place] in marks] or [0]
    return data[: places[0]] + bytes([marks[rng.integers(len(marks))]]) + data[places[0] + 1 :]


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def _block(data: bytes, rng: np.random.Generator) -> tuple[bytes, bytes, bytes]:
    first, last = sorted(rng.integers(0, len(data), 2).tolist())
    last = min(last, first + 4096)
    return data[:first], data[first:last], data[last:]


def _without_a_block(data: bytes, rng: np.random.Generator) -> bytes:
    before, _, after = _block(data, rng)
    return before + after


def _with_a_block_of_zeros(data: bytes, rng: np.random.Generator) -> bytes:
    before, block, after = _block(data, rng)
    return before + bytes(len(block)) + after


def _with_a_block_again(data: bytes, rng: np.random.Generator) -> bytes:
    before, block, after = _block(data, rng)
    return before + block * int(rng.integers(2, 20)) + after


def _packed(damage: Damage) -> Damage:
    return lambda data, rng: damage(gzip.compress(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data), rng)


DAMAGES: dict[str, Damage] = {
    "one byte": _one_byte,
    "one mark": _mark,
    "many bytes": _many_bytes,
    "cut off": _cut,
    "a block gone": _without_a_block,
    "a block of zeros": _with_a_block_of_zeros,
    "a block again": _with_a_block_again,
    "packed, one byte": _packed(_one_byte),
    "packed, cut off": _packed(_cut),
}


@contextmanager
def named_case(name: str) -> Iterator[None]:
    """Names the case in the report of a failure, so that it can be made again."""
    try:
        yield
    except BaseException as error:
        error.add_note(name)
        raise


class ImporterConformance:
    """Tests of one importer; a subclass sets `importer` and the fixture `files`: the files of one small job, companions too.

    `ranks_are_seen`: whether the format shows that a rank is missing; in a table, a wrong byte makes a row of another rank,
    in a protobuf a field that is not known.
    """

    importer: Importer
    ranks_are_seen = True

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

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damaged_file_is_a_trace_that_can_be_kept_or_one_line(self, files, tmp_path, damage):
        data = self.owned(files).read_bytes() if damage.startswith("packed") else plain(self.owned(files))
        ranks = self.importer.read(sorted(files)).meta.ranks
        for seed in range(SEEDS):
            with named_case(f"{damage}, seed {seed}"):
                content = DAMAGES[damage](data, np.random.default_rng(seed))
                self.check_damaged(self.damaged(files, tmp_path / "damaged", content), ranks, tmp_path / "saved")

    def check_damaged(self, paths: list[Path], ranks: int, folder: Path) -> None:
        """Any other exception than the project's own is a failure, as is a silently smaller job and work without end."""
        begun_s = time.process_time()
        outcome = read_or_one_line(self.importer, sorted(paths))
        if isinstance(outcome, Trace):
            is_said = bool(outcome.meta.warnings or loss_warnings(outcome.meta.dropped))
            assert outcome.meta.ranks >= ranks or is_said or not self.ranks_are_seen
            outcome.save(folder)
            Trace.load(folder)
            shutil.rmtree(folder)
        assert time.process_time() - begun_s < MOST_CPU_S

    @FUZZ
    @given(data=st.binary(max_size=2000))
    def test_random_bytes(self, files, tmp_path_factory, data):
        read_or_one_line(self.importer, self.damaged(files, tmp_path_factory.mktemp("random"), data))
        for head in (data, zlib.compress(data)):
            assert self.importer.recognise(head, Path("x")) in (True, False)
