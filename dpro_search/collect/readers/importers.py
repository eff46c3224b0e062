"""``import_trace(sources) -> Trace``: files that other recorders wrote, their format recognised by their content.

A format is a module with a constant ``IMPORTER``. A new one adds its module's name to `IMPORTERS`, and its test subclasses the
conformance kit in ``tests/collect/importer_kit.py``. Modules are imported when a file is to be recognised, in the order of
`IMPORTERS`: the first that recognises a file owns it, so formats that are easily mistaken for others stand behind those.

Of the sources, folders are searched for files. The first format that owns a file reads it together with all others that it owns and
with its companions (files that are useless alone: a symbol graph, a server's log). What is left of a folder (a licence, a note) is
counted as dropped, with a warning. It is an error if its name is that of a file that is read, but for its number: then it is a
rank's, and damaged. A file that the user named and that belongs to no format, or to another one, is an error.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import msgspec

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.readers._bytes import Unpacked
from dpro_search.collect.readers._salvage import loss_warnings
from dpro_search.collect.trace import Trace
from dpro_search.errors import DproSearchError, InputError

HEAD_BYTES = 1 << 16

_NUMBER = re.compile(r"\d+")

IMPORTERS = (
    "dpro_search.collect.readers.recorder",
    "dpro_search.collect.readers.kineto.importer",
    "dpro_search.collect.readers.straggler_analysis",
    "dpro_search.collect.readers.byteps.importer",
    "dpro_search.collect.readers.mxnet.importer",
    "dpro_search.collect.readers.tensorflow.runmetadata",
    "dpro_search.collect.readers.chakra",
    "dpro_search.collect.readers.tensorflow.xplane_gpu",
    "dpro_search.collect.readers.horovod.importer",
)


def _none(head: bytes, path: Path) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Importer:
    """A format of raw files."""

    name: str  # As `TraceMeta.format` has it.
    # What it looks for, for the message on an unknown file: "a Kineto profile (JSON with records of categories such as kernel)".
    description: str
    # Whether a file is of this format, from its first 64 KiB (decompressed) and its path. Must not raise, whatever the bytes.
    recognise: Callable[[bytes, Path], bool]
    # The trace of all files of this format that were given, companions among them, sorted by path. Raises `InputError` or
    # `TraceFormatError` with one line.
    read: Callable[[Sequence[Path]], Trace]
    # Whether a file that the format does not own helps to read the others; like `recognise`.
    companion: Callable[[bytes, Path], bool] = _none


def importers() -> tuple[Importer, ...]:
    """All known formats, in the order in which they are tried."""
    return tuple(import_module(name).IMPORTER for name in IMPORTERS)


def import_trace(sources: Sequence[Path]) -> Trace:
    """Read files or folders of files, of one job.

    Raises
    ------
    InputError
        A source does not exist or is empty, no file is of a known format, or there are files of several.
    TraceFormatError
        A file is damaged beyond what its format can leave out.
    """
    with _files_from_pipes(sources) as files:
        return _import(files)


def is_recognised(path: Path) -> bool:
    """Whether a file is of a format that `import_trace` reads; a file that cannot be read is not."""
    try:
        return _owner(read_head(path), path, importers()) is not None
    except DproSearchError:
        return False


def _import(sources: Sequence[Path]) -> Trace:
    importer, chosen, left = _recognised(sources)
    trace = importer.read(chosen)
    dropped = dict(trace.meta.dropped) | ({"files of another format or none": len(left)} if left else {})
    warnings = [*trace.meta.warnings, *loss_warnings(trace.meta.dropped)]
    if left:
        names = ", ".join(str(path) for path in left[:3]) + (", ..." if len(left) > 3 else "")
        what = f"{len(left)} files, none of them {importer.description}, were"
        if len(left) == 1:
            what = f"1 file is not {importer.description} and was"
        warnings.append(f"{what} left out: {names}")
    return replace(trace, meta=msgspec.structs.replace(trace.meta, dropped=dropped, warnings=tuple(warnings)))


def _recognised(sources: Sequence[Path]) -> tuple[Importer, list[Path], list[Path]]:
    """The importer for the sources, the files that it is to read, and those of a folder that it is not."""
    named = [source for source in sources if not source.is_dir()]
    files = _distinct([*named, *(path for source in sources if source.is_dir() for path in files_of(source))])
    heads = {path: read_head(path) for path in files}
    known = importers()
    owner = {path: _owner(head, path, known) for path, head in heads.items()}
    first = next((importer for importer in known if importer in owner.values()), None)
    if first is None:
        shown = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
        foreign = next((f"{path}: {what}" for path, head in heads.items() if (what := _foreign(head, path))), "")
        if foreign:
            raise InputError(foreign)
        raise InputError(
            f"{shown}: {_nothing_known(heads)}; looked for {', '.join(i.description.partition(' (')[0] for i in known)}"
        )
    chosen = [path for path, importer in owner.items() if importer is first or first.companion(heads[path], path)]
    left = [path for path in files if path not in set(chosen)]
    for path in left:
        if path in named:
            other = owner[path]
            what = f"is {other.description}" if other else _foreign(heads[path], path) or _nothing_known({path: heads[path]})
            raise InputError(f"{path}: {what}, but {chosen[0]} is {first.description}; import one job at a time")
    _require_all_ranks({path for path in left if owner[path] is None}, chosen)
    return first, sorted(chosen), left


def _require_all_ranks(unknown: Collection[Path], chosen: Sequence[Path]) -> None:
    """Raise `InputError` for a file of no format whose name differs from that of a chosen one in its number only."""
    ranks = {_NUMBER.sub("#", str(path)): path for path in chosen}
    for path in sorted(unknown):
        other = ranks.get(_NUMBER.sub("#", str(path)))
        if other is not None:
            raise InputError(
                f"{path}: of no known format, empty or damaged, but named as {other.name} of the same job; "
                "record or copy it again, or remove it to import the job without it"
            )


@contextmanager
def _files_from_pipes(sources: Sequence[Path]) -> Iterator[list[Path]]:
    """The sources, of which those that can be read once only, such as ``<(zcat x.gz)``, are copied to files."""
    pipes = [source for source in sources if source.is_fifo()]
    if not pipes:
        yield list(sources)
        return
    with scratch_folder("import") as folder:
        copies = {pipe: folder / f"pipe-{pipe.name}" for pipe in pipes}
        for pipe, copy in copies.items():
            with pipe.open("rb") as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target)
        try:
            yield [copies.get(source, source) for source in sources]
        except DproSearchError as error:
            message = str(error)
            for pipe, copy in copies.items():
                message = message.replace(str(copy), str(pipe))
            raise type(error)(message) from error


def read_head(path: Path, size: int = HEAD_BYTES) -> bytes:
    """The first bytes of a file, decompressed where it is gzip, as far as they can be; `InputError` if it cannot be opened."""
    head = b""
    for piece in Unpacked(path, piece_bytes=size):
        head += piece
        if len(head) >= size:
            break
    return head[:size]


def files_of(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders, without hidden ones."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if (path.is_file() or (path.is_symlink() and not path.exists()))  # a link that leads nowhere is an error, not a rank less
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise InputError(f"{folder}: the folder has no files")
    return files


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """The paths, without those that lead to a file that came before."""
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]  # Path.resolve refuses loops


def _owner(head: bytes, path: Path, known: Sequence[Importer]) -> Importer | None:
    return next((importer for importer in known if head and importer.recognise(head, path)), None)


def _foreign(head: bytes, path: Path) -> str:
    """The kind of a file that no importer reads, and advice on it; "" if the kind is unknown."""
    return next((what for what, is_it in _FOREIGN.items() if is_it(head, path)), "")


_TORCH = "profile with torch.profiler.profile and export_chrome_trace"
# How files begin that people try to import; the longer descriptions say what to do instead.
_FOREIGN: dict[str, Callable[[bytes, Path], bool]] = {
    "a NumPy archive of a trace folder; give the folder to replay, diagnose or run": lambda head, path: (
        head.startswith(b"PK\x03\x04") and path.suffix == ".npz"
    ),
    "a zip archive; unpack it and import the files in it": lambda head, _: head.startswith(b"PK\x03\x04"),
    "a tar archive; unpack it and import the files in it": lambda head, _: head[257:262] == b"ustar",
    f"a report of Nsight Systems, which cannot be imported in any of the types of 'nsys export'; {_TORCH}": lambda head, path: (
        head.startswith(b"SQLite format 3\0") or path.suffix in (".nsys-rep", ".qdrep")
    ),
    "a Chakra or PyTorch execution trace in JSON; convert it to protobuf (.et) with chakra_converter, or import the Kineto profile "
    "of the same run": lambda head, _: b'"schema"' in head[:4096] and (b"chakra" in head[:4096] or b'"nodes"' in head[:4096]),
    f"a trace of the old profiler torch.autograd.profiler, which has no launches; {_TORCH}": lambda head, _: (
        b'"CPU functions"' in head or b'"CUDA functions"' in head
    ),
    "a web page, not a profile; download the file itself": lambda head, _: (
        head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html"))
    ),
    f"a pickle, which is not opened because it can run code; {_TORCH}": lambda head, _: head[:2] in (b"\x80\x02", b"\x80\x04"),
}


def _nothing_known(heads: dict[Path, bytes]) -> str:
    if not any(heads.values()):
        return "empty, or compressed and damaged"
    return "of no known format" if len(heads) == 1 else f"none of {len(heads)} files is of a known format"
