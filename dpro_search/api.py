"""The Python API: recordings and searches as values, which a notebook shows as tables.

>>> import dpro_search
>>> job = dpro_search.load()  # the bundled sample, or a folder that `dpro-search collect` or `import` wrote
>>> job
Recording(folder=...)
>>> abs(job.replay().error_pct) < 8  # the prediction of the recorded setting, beside its measurement
True
>>> job.replay(changes={"rate": "100mbit"}).iteration_us > job.replay().iteration_us
True

A method does what the verb of its name does on the command line, with the same code. Times are numbers of microseconds and sizes
numbers of bytes, which print with the unit that suits them: ``561.4 ms``, ``1.6 GiB``. All errors are subclasses of
`DproSearchError` (`dpro_search.errors`), with one line that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dpro_search._api.errors import speaks_python
from dpro_search._api.recording import Recording
from dpro_search._api.run import Run
from dpro_search._api.values import Bytes, Diagnosis, Microseconds, RealRuns, Replay
from dpro_search.collect._files import write_file
from dpro_search.collect.sample import sample_trace_path
from dpro_search.errors import DproSearchError, InputError
from dpro_search.kinds import load_source
from dpro_search.search import SearchResult
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan, Prediction

__all__ = [
    "Bytes",
    "Diagnosis",
    "DproSearchError",
    "Microseconds",
    "Plan",
    "Prediction",
    "RealRuns",
    "Recording",
    "Replay",
    "Run",
    "capture",
    "describe",
    "import_trace",
    "load",
    "load_run",
]


@speaks_python
def load(folder: str | Path | None = None, *, sample: str | None = None) -> Recording:
    """Open a trace folder, or a file that describes a job; None: a bundled sample, by its name, or the default one.

    Raises
    ------
    InputError
        It is neither, or is damaged; or there is no such sample.

    Examples
    --------
    >>> load().trace.meta.framework
    'pytorch'
    >>> load("nowhere")
    Traceback (most recent call last):
    dpro_search.errors.InputError: nowhere: not a trace folder, but no such file or folder; make one with 'dpro-search collect'...
    """
    path = sample_trace_path(sample) if folder is None else Path(folder)
    return Recording(folder=path, source=load_source(path))


@speaks_python
def import_trace(sources: str | Path | Sequence[str | Path], out: str | Path, *, parameters: str | Path | None = None) -> Recording:
    """Convert raw files of one job, of any format that ``dpro-search import`` knows, into the new trace folder `out`.

    `parameters` is a file of names and sizes of parameters, for a PyTorch profile without shapes (`collect.readers.parameters`).

    Raises
    ------
    InputError
        A file is of no known format, or `out` exists.
    """
    from dpro_search.collect.readers import importers
    from dpro_search.collect.readers.parameters import with_parameters

    if Path(out).exists():
        raise InputError(f"{out}: exists already; remove it or choose another folder")
    paths = [Path(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    if not paths:
        raise InputError("sources: no file is named")
    trace = importers.import_trace(paths)
    if parameters is not None:
        trace = with_parameters(trace, Path(parameters))
    trace.save(Path(out))
    return Recording(folder=Path(out), source=trace)


@speaks_python
def describe(
    model: str,
    cluster: str,
    out: str | Path,
    *,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    framework: str | None = None,
) -> Recording:
    """Write the description of a parallel job into the new file `out`, and open it.

    Parameters
    ----------
    model
        A built-in model, like "llama3-8b", or the path of a ``config.json`` of Hugging Face.
    cluster
        What the job runs on, like "16xhgx-h100", "512xh100" or a TOML file.
    global_batch, sequence
        Sequences of a step, and tokens of a sequence; None: 4 a device, and the model's own, at most 4,096.
    precision, framework
        Those of matrix products, and what trains the model; None: "bf16" or what the device has, and "megatron-core".

    Raises
    ------
    InputError
        `out` exists, or the job cannot be described.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     job = describe("llama3-8b", "4xhgx-h100", f"{folder}/job.toml", global_batch=128, sequence=8192)
    >>> job.replay(changes={"tp": 2}).iteration_us > 1e6
    True
    """
    from dpro_search.collect._files import require_new
    from dpro_search.kinds import Wanted, description_text

    path = Path(out)
    require_new(path)
    usual = Wanted(
        model=model, cluster=cluster, global_batch=global_batch, sequence=sequence, precision=precision, framework=framework
    )
    write_file(path, description_text(usual).encode())
    return load(path)


@speaks_python
def capture(
    model: str,
    out: str | Path,
    *,
    mesh: Mapping[str, int] | None = None,
    batch: int = 1,
    sequence: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    cluster: str | None = None,
    python: str | None = None,
    on_progress: Callable[[str], None] = lambda words: None,
    **functions: str,
) -> Recording:
    """Capture the training step of a PyTorch module without running it; opens the job that `out` then describes.

    Parameters
    ----------
    model
        A script and its function that returns the model, like "train.py:build_model".
    mesh
        Ranks along the axes "dp", "dp_shard", "tp", "pp", "cp" and "ep".
    batch, sequence
        Samples of one replica, or of a micro-batch, and tokens of a sample.
    cluster
        The cluster of the job; None: as many H100 as the mesh has ranks.
    python
        An interpreter that has PyTorch; None: that of ``scripts/make_env.sh torch``.
    on_progress
        Called with a few words on each part of the work.
    functions
        Further functions of the script by their purpose: `inputs`, `loss`, `tp_plan`, `parallelize`.

    Raises
    ------
    InputError
        `out` exists, or the model cannot be captured.
    MissingCapabilityError
        The interpreter has no PyTorch.
    """
    from dpro_search.collect.capture.runner import capture_request
    from dpro_search.kinds import write_captured

    unknown = sorted(functions.keys() - {"inputs", "loss", "tp_plan", "parallelize"})
    if unknown:
        raise InputError(f"{unknown[0]}: no such parameter; functions are inputs, loss, tp_plan and parallelize")
    axes = ",".join(f"{axis}={ranks}" for axis, ranks in (mesh or {}).items())
    options = {"batch": batch, "sequence": sequence, "precision": precision, "optimizer": optimizer, **functions}
    request = capture_request(model, python=python, mesh=axes, **options)
    write_captured(request, Path(out), cluster, on_progress)
    return load(Path(out) / "job.toml")


@speaks_python
def load_run(folder: str | Path) -> Run:
    """Open the run folder of an earlier search.

    Raises
    ------
    InputError
        It is not a run folder, is damaged, or the search has no result yet.
    """
    path = Path(folder)
    read_run(path)
    result = SearchResult.load(path)
    if not result.plans:
        raise InputError(f"{path / 'result.json'}: no plans in it; search again with 'dpro-search run'")
    # The folder may have been moved, or made by somebody else: paths in its files are not used.
    return Run(folder=path, result=msgspec.structs.replace(result, run=str(path)))


def __dir__() -> list[str]:
    return list(__all__)
