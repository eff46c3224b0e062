"""`score`: what the imported profiles predict, beside what was measured without a profiler; tables in Markdown."""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import dpro_search
from dpro_search.cluster import bundled
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.errors import DproSearchError, InputError
from dpro_search.kinds import Job, PlanOptions, job_of
from dpro_search.kinds.recorded.job import ProfiledJob
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scale, Scenario
from experiments.validation.gpu_jobs.kernels import kernel_rows
from experiments.validation.gpu_jobs.results import RESULTS

BASES = ("eager", "as recorded", "eager after profiling")  # the variant that a profile is of
WHAT_IFS: Mapping[str, tuple[str, ...]] = {
    # By variant: the what-ifs that ask for it.
    "graph": ("launch=0",),
    "without optimizer": ("kernels.optimizer=0",),
    "loaded once": ("loading=0",),
    "compiled": ("compile=1",),
}
PLANS: Mapping[str, Plan] = {
    "gradient_as_bucket_view": Plan.of(gradient_as_bucket_view=True),
    "bucket_cap_mb=1": Plan.of(bucket_cap_bytes=2**20),
    "bucket_cap_mb=100": Plan.of(bucket_cap_bytes=100 * 2**20),
    "reshard_after_forward=False": Plan.of(reshard_after_forward=False),
    "prefetch": Plan.of(prefetch=True),
}
RECOMPUTED = "half recomputed"
TWO_RANKS = "2-ranks"  # of one GPU, in turn: their kernels' durations hold each other's
Row = Sequence[str]


@dataclass(kw_only=True)
class Profile:
    """A profile that came back, with what was measured of its job."""

    name: str
    trace: Trace
    job: Job
    facts: Mapping[str, Any]
    measured: Mapping[str, float]  # Median step in us, by variant.
    profiled_again_us: float | None  # Of the same training, measured behind the profile.

    @cached_property
    def as_measured(self) -> ProfiledJob:
        """The job told what a step takes without the profiler: one measured number, and that of no variant."""
        assert isinstance(self.job, ProfiledJob)
        if self.base_us is None or TWO_RANKS in self.name:
            return self.job
        with suppress(InputError):  # the replay is shorter
            job, _ = self.job.under(Scenario(measured_us=self.base_us))
            assert isinstance(job, ProfiledJob)
            return job
        return self.job

    @property
    def base_us(self) -> float | None:
        """The step of the variant that was profiled, measured without a profiler."""
        found = next((self.measured[name] for name in BASES if name in self.measured), None)
        return self.profiled_again_us if found is None else found


def main(folder: Path, captured: Path | None = None) -> None:
    """Print all tables.

    Parameters
    ----------
    captured
        A folder with what `dpro-search capture` made of each job, by the job's name.
    """
    results = json.loads((folder / RESULTS).read_text())
    print(", ".join(f"{name} {value}" for name, value in results["machine"].items()), end="\n\n")
    _print_times(results["times"])
    with tempfile.TemporaryDirectory() as unpacked:
        profiles = list(_profiles(folder, Path(unpacked), results))
    _print("Replayed profiles", _REPLAYED, [_replayed_row(profile) for profile in profiles])
    _print("What-ifs", _ASKED, [row for profile in profiles for row in _what_if_rows(profile, results["times"])])
    _print("Plans", _ASKED, [row for profile in profiles for row in _plan_rows(profile)])
    _print("Peak memory", ("profile", "predicted, MiB", "measured, MiB", "error, %"), [*_memory_rows(profiles)])
    gpu = str(results["machine"].get("gpu", ""))
    alone = [profile.trace for profile in profiles if TWO_RANKS not in profile.name]
    kernels = ("ops of PyTorch", "shapes", "ms a step", "median error, %", "90 % of errors below, %", "all together, %")
    _print(f"Predicted latencies on {gpu}, cold", kernels, [*kernel_rows(alone, gpu)])
    if captured is not None:
        _print("Captured, never run", _CAPTURED, [*_captured_rows(captured, results["times"], f"1x{_device_name(gpu)}")])
    for name, text in results["errors"].items():
        print(f"* {name}: {text.strip().splitlines()[-1]}")
    print("* no time for:", ", ".join(results["skipped"]) or "nothing")


def step_us(variant: Mapping[str, Any]) -> float:
    """Median step of all rounds by the device's clock; where there is none, by the host's."""
    events_us = [us for each in variant["rounds"] for us in each["events_us"]]
    return float(np.median(events_us or [each["wall_us"] for each in variant["rounds"]]))


def _profiles(folder: Path, unpacked: Path, results: Mapping[str, Any]) -> Iterator[Profile]:
    for volume in sorted(folder.glob("profiles-*.tar")):
        with tarfile.open(volume) as source:
            source.extractall(unpacked, filter="data")
    files: dict[str, list[Path]] = {}
    for path in sorted(unpacked.glob("*.json.gz")):
        files.setdefault(path.name.split(".")[0], []).append(path)
    for name, paths in files.items():
        try:
            trace = import_trace(paths)
            job = job_of(trace, PlanOptions(allow_lossy=True))
        except DproSearchError as error:
            print(f"* {name}: not imported: {error}")
            continue
        for warning in trace.meta.warnings:
            print(f"* {name}: {warning}")
        times = {variant: step_us(facts) for variant, facts in results["times"].get(name, {}).items()}
        again = times.pop(BASES[-1], None)
        yield Profile(
            name=name,
            trace=trace,
            job=job,
            facts=results["profiles"].get(paths[0].name, {}),
            measured=times,
            profiled_again_us=again,
        )


_TIMES = ("job", "variant", "step, ms", "rounds, ms", "by the host's clock, ms", "alone, ms", "peak, MiB")


def _print_times(times: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for job, variants in times.items():
        for variant, facts in variants.items():
            rounds = facts["rounds"]
            each = ", ".join(f"{np.median(one['events_us'] or [one['wall_us']]) / 1e3:.2f}" for one in rounds)
            walls = ", ".join(f"{one['wall_us'] / 1e3:.2f}" for one in rounds)
            alone = float(np.median([us for one in rounds for us in one["synchronised_us"]])) / 1e3
            peak = f"{facts['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in facts else ""
            rows.append((job, variant, f"{step_us(facts) / 1e3:.2f}", each, walls, f"{alone:.2f}", peak))
    _print("Measured steps, without a profiler", _TIMES, rows)


_REPLAYED = (
    "profile", "kind", "steps", "in the profile, ms", "own durations, largest error, %", "held out, mean error, %",
    "in the interval", "replayed, ms", "without profiler, ms", "replayed against that, %", "measured behind the profile, ms",
)  # fmt: skip


def _replayed_row(profile: Profile) -> Row:
    job = profile.job
    assert isinstance(job, ProfiledJob)
    iterations, own = job.recorded_steps.measured.iterations_us, job.own_durations().steps
    held, inside = [], 0
    for step, true_us in iterations.items():
        if len(iterations) > 1:
            found = job.held_out(step).prediction
            held.append(abs(found.iteration_us / true_us - 1) * 100)
            inside += found.interval_us[0] <= true_us <= found.interval_us[1]
    replayed_us = job.predict(Plan()).iteration_us
    base_us, again_us = profile.base_us, profile.profiled_again_us
    return (
        profile.name,
        job.title,
        str(len(iterations)),
        f"{(job.measured_iteration_us or np.nan) / 1e3:.2f}",
        f"{max(abs(step.error_pct) for step in own):.2f}",
        f"{np.mean(held):.2f}" if held else "",
        f"{inside} of {len(held)}",
        f"{replayed_us / 1e3:.2f}",
        "" if base_us is None else f"{base_us / 1e3:.2f}",
        "" if base_us is None else f"{(replayed_us / base_us - 1) * 100:+.1f}",
        "" if again_us is None else f"{again_us / 1e3:.2f}",
    )


_ASKED = (
    "profile", "asked", "predicted, ms", "interval, ms", "measured, ms", "error, %", "predicted gain, %", "measured gain, %",
    "host=", "predicted with that, ms", "error, %", "predicted gain, %",
)  # fmt: skip


def _what_if_rows(profile: Profile, times: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    measured = dict(profile.measured)
    compiled = times.get(f"{profile.name}-compiled", {})
    if "compiled" in compiled:
        measured["compiled"] = step_us(compiled["compiled"])
    for variant, texts in WHAT_IFS.items():
        for text in texts if variant in measured else ():
            yield _asked(profile, text, measured[variant], lambda job, text=text: _asked_about(job, text))


def _asked_about(job: Job, text: str) -> Prediction:
    changed, plan = job.under(Scenario(scales=(Scale.parse(text),)))
    return changed.predict(plan)


def _plan_rows(profile: Profile) -> Iterator[Row]:
    for variant, true_us in profile.measured.items():
        plan = _recomputed(profile.job) if variant == RECOMPUTED else PLANS.get(variant)
        if plan is not None:
            yield _asked(profile, variant, true_us, lambda job, plan=plan: job.predict(plan))


def _recomputed(job: Job) -> Plan | None:
    """The first half of an FSDP job's units computed again."""
    choice = next((choice for choice in job.space.choices if choice.name == "recomputation"), None)
    points = () if choice is None else choice.grids.get("first", ())
    return Plan.of(**points[(len(points) - 1) // 2]) if points else None


def _asked(profile: Profile, text: str, true_us: float, predict: Callable[[Job], Prediction]) -> Row:
    base_us = profile.base_us
    assert base_us is not None
    measured = (f"{true_us / 1e3:.2f}", f"{(1 - true_us / base_us) * 100:+.1f}")
    try:
        found, scaled = predict(profile.job), predict(profile.as_measured)
    except DproSearchError as error:
        return profile.name, text, str(error), "", measured[0], "", "", measured[1], "", "", "", ""
    shown, again = (
        (
            f"{each.iteration_us / 1e3:.2f}",
            f"{(each.iteration_us / true_us - 1) * 100:+.1f}",
            f"{(1 - each.iteration_us / job.predict(Plan()).iteration_us) * 100:+.1f}",
        )
        for job, each in ((profile.job, found), (profile.as_measured, scaled))
    )
    interval = " to ".join(f"{us / 1e3:.2f}" for us in found.interval_us)
    factor = f"{profile.as_measured.on_cluster.host_factor:.2f}"
    return profile.name, text, shown[0], interval, measured[0], shown[1], shown[2], measured[1], factor, *again


_CAPTURED = (
    "job",
    "predicted, ms",
    "interval, ms",
    "measured, ms",
    "error, %",
    "as a CUDA graph, ms",
    "peak predicted, MiB",
    "measured, MiB",
)


def _captured_rows(folder: Path, times: Mapping[str, Mapping[str, Any]], cluster: str) -> Iterator[Row]:
    for path in sorted(folder.glob("*/job.toml")):
        variants = times.get(path.parent.name, {})
        if "eager" not in variants:
            continue
        found = dpro_search.load(path).replay(cluster=cluster)
        true_us, peak = step_us(variants["eager"]), found.facts.get("peak_memory_bytes")
        yield (
            path.parent.name,
            f"{found.iteration_us / 1e3:.2f}",
            " to ".join(f"{us / 1e3:.2f}" for us in found.interval_us),
            f"{true_us / 1e3:.2f}",
            f"{(found.iteration_us / true_us - 1) * 100:+.1f}",
            f"{step_us(variants['graph']) / 1e3:.2f}" if "graph" in variants else "",
            "" if peak is None else f"{peak / 2**20:.0f}",
            f"{variants['eager']['peak_bytes'] / 2**20:.0f}",
        )


def _device_name(gpu: str) -> str:
    return bundled.aliases("device").get(bundled.plain(gpu), gpu)


def _memory_rows(profiles: Sequence[Profile]) -> Iterator[Row]:
    for profile in profiles:
        predicted, measured = profile.job.predict(Plan()).peak_memory_bytes, profile.facts.get("peak_bytes")
        if predicted and measured:
            error = f"{(predicted / measured - 1) * 100:+.1f}"
            yield profile.name, f"{predicted / 2**20:.0f}", f"{measured / 2**20:.0f}", error


def _print(title: str, columns: Row, rows: Sequence[Row]) -> None:
    print(f"### {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)
