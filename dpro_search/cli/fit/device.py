"""The part of `dpro-search fit` on devices: times library ops on this machine's, and adds it to the user's devices."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cluster import Device
    from dpro_search.costmodel.devices.sampled import HeldOutErrors
    from dpro_search.costmodel.devices.written import OpSpec
    from dpro_search.measure.ops import OpProgress

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")


def measure_device(
    out: Path | None,
    *,
    name: str | None,
    budget: int,
    python: str | None,
    specs: str | None,
    trace: Path | None,
    longest_s: float,
    as_json: bool,
) -> None:
    """Time ops on this machine's device into a file of the user's devices, or into `out`; goes on where a call stopped."""
    from dpro_search.cli.printing import print_json, stderr_console
    from dpro_search.cluster import bundled
    from dpro_search.costmodel.devices.sampled import held_out, latency_on, outside_of
    from dpro_search.errors import InputError
    from dpro_search.measure.ops import OpTimer, add_device, usual_name

    if name is not None and not _NAME.fullmatch(bundled.plain(name)):
        raise InputError(f"--name {name}: use letters, digits, dots and hyphens")
    given = _path(out, bundled.plain(name) if name else None) if out or name else None
    job_ops = _ops_of(trace) if trace is not None else []
    described = _device(specs) if specs is not None else None
    with stderr_console().status("starting PyTorch") as status, OpTimer(_interpreter(python)) as timer:

        def show(progress: OpProgress) -> None:
            status.update(f"{progress.rows} of {progress.limit} ops, now {progress.now}")

        path = given or _path(None, usual_name(timer.device))
        device, progress = add_device(
            timer, path, budget=budget, specs=described, job_ops=job_ops, longest_us=longest_s * 1e6, on_progress=show
        )
    latency_on(device)  # says so if the samples contradict the specs
    scores, noise_pct = held_out(device), statistics.median(sample.spread_pct for sample in device.samples)
    facts = {
        "device": path.stem,
        "file": str(path),
        "models": [] if scores is None else [_facts(path.stem, scores)],
        "samples": progress.rows,
        "new": progress.new,
        "failed": dict(progress.failed),
        "offered": progress.offered,
        "complete": progress.rows >= budget,
        "noise_pct": round(noise_pct, 2),
        "outside": outside_of(device),
    }
    if as_json:
        print_json(facts)
        return
    for reason, count in progress.failed.items():
        stderr_console().print(f"warning: {count} ops could not be timed: {reason}", style="yellow")
    _print(device, path, out, facts, scores)


def _interpreter(given: str | None) -> str:
    """The one given, else that of the project's environment for PyTorch."""
    from dpro_search.collect.launch.ranks import environment_python

    return given or str(environment_python("torch"))


def _path(out: Path | None, name: str | None) -> Path:
    from dpro_search.cluster import bundled, user_devices
    from dpro_search.errors import InputError

    if out is not None:
        if out.suffix.lower() != ".toml":
            raise InputError(f"--out {out}: a device is a file whose name ends in .toml")
        return out
    assert name is not None
    if name in bundled.aliases("device") or name in bundled.aliases("machine"):
        raise InputError(f"--name {name}: is bundled; choose another, like my-{name}")
    return user_devices.folder() / f"{name}.toml"


def _device(specs: str) -> Device:
    from dpro_search.cluster import bundled
    from dpro_search.cluster.files import load_device

    path = Path(specs)
    return load_device(path if path.suffix.lower() == ".toml" else bundled.find("device", specs), bundled.find)


def _ops_of(source: Path) -> list[OpSpec]:
    """Ops of a job: of a trace from a profile with shapes, or of a ``job.toml``."""
    from dpro_search.collect.trace import Trace
    from dpro_search.costmodel.devices.recorded import specs_of
    from dpro_search.errors import InputError
    from dpro_search.parallel.costs.op_specs import products_of
    from dpro_search.parallel.file.description import described

    if source.is_file():
        job = described(source)
        specs = [] if job is None else products_of(job.workload(job.strategy))
        hint = "describe a job with 'dpro-search describe'"
    else:
        specs = specs_of(Trace.load(source))
        hint = "profile with record_shapes=True"
    if not specs:
        raise InputError(f"--trace {source}: it has no ops of known shapes; {hint}")
    return specs


def _facts(name: str, scores: HeldOutErrors) -> dict[str, Any]:
    return {
        "name": name,
        "rows": scores.rows,
        "mape_pct": round(scores.mape_pct, 2),
        "median_ape_pct": round(scores.median_ape_pct, 2),
        "coverage": round(scores.coverage, 3),
    }


def _print(device: Device, path: Path, out: Path | None, facts: dict[str, Any], scores: HeldOutErrors | None) -> None:
    rest = "" if facts["complete"] else f"; no more of the {facts['offered']} ops that are short enough could be timed"
    print(f"{device.name}: {facts['samples']} ops, {facts['new']} timed now{rest}")
    print(f"noise (half the distance of the quartiles of 7 rounds): {facts['noise_pct']:.1f} %")
    if scores is not None:
        print(
            f"ops that are predicted from the others ({scores.rows}): off by {scores.mape_pct:.1f} % in the mean, "
            f"{scores.median_ape_pct:.1f} % in the median; {scores.coverage * 100:.0f} % are in their 90 % interval"
        )
    if facts["outside"]:
        print(facts["outside"])
    use = f'device = "{path.name}" in a cluster file beside it' if out is not None else f"--cluster {path.stem}"
    print(f"device file: {path} (use it with {use})")
