"""Request of a search: the objective of a job, and the facts that identify the search in its run folder.

    options = PlanOptions(allow_lossy=True)
    request = SearchRequest.of(folder, job_of(Trace.load(folder), options), options.named)
    run_search(request.objective, trials=500, out=out, trace_digest=request.trace_digest, options=request.options)

The command line and the Python API both use it, so that each can continue the other's runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpro_search._regular_files import open_regular, read_regular
from dpro_search.errors import InputError
from dpro_search.search.calibration import CalibratedObjective, Calibration, calibration_named
from dpro_search.search.objective import Objective
from dpro_search.search.run_folder import RunInfo


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The arguments of `run_search` that depend on what is searched, and not on how."""

    objective: Objective  # Predicts the job's plans, corrected if a calibration was requested.
    # trace, trace_digest: Path of the recording, and the digest of its content.
    trace: str
    trace_digest: str
    # What predictions depend on beside the trace, by name: files by the digest of their content, a calibration by its measurements.
    options: Mapping[str, str]
    note: str = ""  # What a calibration does, in one line; empty without one.

    @staticmethod
    def of(folder: Path, objective: Objective, options: Mapping[str, str | Path], calibrate: Path | None = None) -> SearchRequest:
        """The request for a search over the trace in a folder.

        Parameters
        ----------
        objective
            Predicts plans of the trace's job.
        options
            What its predictions depend on beside the trace, by name; files and folders as paths.
        calibrate
            A run folder whose real runs correct the predictions; None: no correction.

        Raises
        ------
        InputError
            A file that the options name is missing, or the calibration's is damaged.
        """
        named = {name: value if isinstance(value, str) else _digest_of_files(value) for name, value in options.items()}
        note = ""
        if calibrate is not None:
            calibration = Calibration.load(calibrate)
            objective = CalibratedObjective(objective, calibration)
            named["calibration"], note = calibration.named, calibration.summary
        return SearchRequest(
            objective=objective,
            trace=os.path.realpath(folder),
            trace_digest=digest_of(folder),
            options=named,
            note=note,
        )


def usual_run(trace: Path, sampler: str, seed: int) -> Path:
    """The default run folder of a search."""
    path = Path(os.path.realpath(trace))
    return Path("runs") / f"{path.stem if path.is_file() else path.name}-{sampler}-seed{seed}"


def digest_of(trace: Path) -> str:
    """SHA-256 of the content of a trace's folder or of a description (a file or a folder of files), wherever it lies."""
    digest = hashlib.sha256()
    if trace.is_file():
        return hashlib.sha256(read_regular(trace)).hexdigest()
    is_trace = (trace / "meta.json").exists() or not trace.is_dir()
    for name in ("meta.json", "trace.npz") if is_trace else sorted(path.name for path in trace.iterdir() if path.is_file()):
        with open_regular(trace / name) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def calibration_of(info: RunInfo, run: Path) -> Calibration:
    """The calibration of a run folder's predictions; without sessions, if they are not corrected.

    Raises `InputError` if the folder was made by a version with another format of calibrations.
    """
    text = info.options.get("calibration")
    return Calibration() if text is None else calibration_named(text, f"{run / 'run.json'}, options")


def _digest_of_files(path: Path) -> str:
    """SHA-256 of a file, or of the JSON files of a folder; raises `InputError` if none exists."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        digest.update(read_regular(file))
    return digest.hexdigest()[:16]
