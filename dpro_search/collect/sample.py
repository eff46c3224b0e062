"""The bundled recordings. `DEFAULT_SAMPLE` is used where a command names no trace.

A sample is a folder of ``dpro_search/samples``, and its name is the folder's:

=========================  =====================================================================================
``meta.json, trace.npz``   the trace, as ``collect`` wrote it
``sample.toml``            `BundledSample`'s description and provenance
``validation.json``        if its best plans ran for real: what ``validate`` wrote
=========================  =====================================================================================
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from dpro_search.errors import InputError, MissingCapabilityError

_SAMPLES = Path(__file__).parent.parent / "samples"
DEFAULT_SAMPLE = "gpt_ddp_1gbit"


@dataclass(frozen=True, kw_only=True)
class BundledSample:
    """A bundled recording."""

    name: str
    folder: Path  # The trace folder.
    description: str  # The job, in one line.
    provenance: str  # How the recording was made.

    @property
    def validation(self) -> Path | None:
        """The file with the real runs of its best plans; None: there were none."""
        path = self.folder / "validation.json"
        return path if path.is_file() else None


def samples() -> tuple[BundledSample, ...]:
    """All bundled recordings, the default first; none if the package was built without them."""
    folders = sorted((path.parent for path in _SAMPLES.glob("*/sample.toml")), key=lambda path: (path.name != DEFAULT_SAMPLE, path))
    return tuple(
        BundledSample(name=folder.name, folder=folder, **tomllib.loads((folder / "sample.toml").read_text("utf-8")))
        for folder in folders
    )


def sample_of(folder: Path) -> BundledSample | None:
    """The sample that a trace folder is; None: it is none."""
    return next((sample for sample in samples() if sample.folder == Path(os.path.realpath(folder))), None)


def sample_trace_path(name: str | None = None) -> Path:
    """Folder of a bundled trace; None: of the default one.

    Raises
    ------
    InputError
        There is no such sample.
    MissingCapabilityError
        The package was built without samples.
    """
    folder_of_sample = {sample.name: sample.folder for sample in samples()}
    if not folder_of_sample:
        raise MissingCapabilityError(f"{_SAMPLES}: no bundled trace in this installation; name a TRACE folder")
    if (name or DEFAULT_SAMPLE) not in folder_of_sample:
        raise InputError(f"--sample {name or DEFAULT_SAMPLE}: no such sample (known: {', '.join(folder_of_sample)})")
    return folder_of_sample[name or DEFAULT_SAMPLE]
