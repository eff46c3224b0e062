"""`measure`: records the jobs, runs every case, and writes the numbers that a person would have: ``cases.jsonl``.

Of each case: mean and median step time (or tokens a second, where a case counts otherwise), the step time on one host, bus
bandwidth of an all-reduce of 64 MiB, and, where ranks compute, the rate of a matrix product. A number that a fault cannot move is
that of the healthy job. Where a fault takes no processor time from ranks, they wait in place of computing: times of cores that are
shared with other machines vary by more than some faults.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.host_limits import HostLimits
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.kinds import described_job, job_of, load_source, timed_job
from dpro_search.kinds._kind import Description
from dpro_search.parallel.timed.recording import timed_exchanges
from experiments.injected_faults.cases import HEALTHY, JOBS, Case, Fault
from experiments.parallel.cases import SEQUENCE
from experiments.parallel.measure import cores_of

TRAIN = Path(__file__).with_name("train.py")
WARMUP, STEPS, RECORDED_STEPS = 2, 11, 11  # Eight steps are measured, two of them fourth ones.
ALL_REDUCE_BYTES = 64 << 20
_RECORDED = {1: "micro_batch=1", 4: "micro_batch=4"}  # Cuts that causes of large micro-batches need.


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case as it was measured."""

    number: int
    job: str
    cause: str
    words: str
    paced: bool
    measured: dict[str, str]  # As ``--measured`` takes them.


def rows_of(out: Path) -> list[Row]:
    """Cases that were measured so far."""
    path = out / "cases.jsonl"
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()] if path.exists() else []


def measure(out: Path, cases: list[Case], python: str, say: Callable[[str], None]) -> None:
    """Measure the cases that the folder lacks."""
    testbed = Testbed(out, python, say)
    done = {row.number for row in rows_of(out)}
    for case in cases:
        if case.number in done:
            continue
        measured = testbed.numbers(case)
        row = Row(number=case.number, job=case.job, cause=case.cause, words=case.fault.words, paced=case.paced, measured=measured)
        with (out / "cases.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        say(f"{case.number} {case.job}, {case.cause} {case.fault.words}: {measured}")


class Testbed:
    """Jobs on this machine's cores; what was measured of the healthy ones is kept in ``healthy.json``."""

    def __init__(self, out: Path, python: str, say: Callable[[str], None]) -> None:
        self._out, self._python, self._say = out, python, say
        self._healthy_file = out / "healthy.json"
        self._healthy: dict[str, dict[str, float]] = (
            json.loads(self._healthy_file.read_text()) if self._healthy_file.exists() else {}
        )

    def job_file(self, name: str, *, hosts: int = 2) -> Path:
        """The ``job.toml`` of a job, with recorded times."""
        job = JOBS[name]
        folder = self._out / f"{name.replace(', ', '-').replace(' ', '-')}-{hosts}"
        path = job.write(folder, f"../{job.model}.times.json", hosts=hosts)
        recorded = folder / "recorded"
        if hosts > 1 and not recorded.exists():
            cuts = [f"micro_batch={size}" for size in sorted({job.micro_batch, *(_RECORDED if job.micro_batch == 8 else ())})]
            timed_job(path, cuts, self._command(path, RECORDED_STEPS), self._out / f"{job.model}.times.json", on_start=self._say)
            recorded.touch()
        return path

    def numbers(self, case: Case) -> dict[str, str]:
        """The numbers of a case, as ``--measured`` takes them."""
        name, fault, healthy = case.job, case.fault, self._of_healthy(case.job, paced=case.paced)
        steps_s, product = self._steps_s(case, healthy["step_s"])
        numbers = {"step_time": f"{np.mean(steps_s):.4f}s", "median_step_time": f"{np.median(steps_s):.4f}s"}
        if fault.counts_one_rank:
            numbers = {"tokens_per_second": f"{JOBS[name].batch * SEQUENCE / 2 / np.mean(steps_s):.1f}"}
        if not case.paced:
            numbers["gemm"] = f"{product / 1e12:.5f}TFLOP/s"
        one_host_s = healthy.get("one_host_s")
        if one_host_s is not None:
            if fault.shows_on_one_host:
                one_host_s = float(np.mean(self._steps_s(case, healthy["step_s"], hosts=1)[0]))
            numbers["one_host_step_time"] = f"{one_host_s:.4f}s"
        rate = self._all_reduce_bytes_per_s(name, fault) if fault.shows_in_exchanges else healthy["all_reduce_bytes_per_s"]
        numbers["all_reduce"] = f"{rate / 1e9:.5f}GB/s"
        return numbers

    def _of_healthy(self, name: str, *, paced: bool) -> Mapping[str, float]:
        key = f"{name}, paced" if paced else name
        if key not in self._healthy:
            self.job_file(name)
            healthy = Case(number=0 if paced else 1, job=name, cause=HEALTHY, fault=Fault())
            step_s = float(np.mean(self._steps_s(healthy, 0.0)[0]))
            known = self._healthy.get(name if paced else f"{name}, paced", {}).get("all_reduce_bytes_per_s")
            numbers = {"step_s": step_s, "all_reduce_bytes_per_s": known or self._all_reduce_bytes_per_s(name, Fault())}
            if not JOBS[name].zero_stage:
                numbers["one_host_s"] = float(np.mean(self._steps_s(healthy, 0.0, hosts=1)[0]))
            self._healthy[key] = numbers
            self._healthy_file.write_text(json.dumps(self._healthy, indent=1))
            self._say(f"healthy {key}: {numbers}")
        return self._healthy[key]

    def _steps_s(self, case: Case, healthy_s: float, *, hosts: int = 2) -> tuple[np.ndarray, float]:
        """Times of the steps, and FLOP/s of a matrix product on rank 0."""
        fault, path = case.fault, self.job_file(case.job, hosts=hosts)
        source = load_source(path)
        assert isinstance(source, Description)
        here = job_of(source)
        with scratch_folder("injected-fault-") as work:
            pauses = {"stall_s": fault.stall_share * healthy_s, "pause_s": fault.pause_shares * healthy_s}
            env = {**fault.env, "INJECTED_FAULT": json.dumps({**pauses, "product": str(work / "product")})}
            real: RecordedJob = described_job(source, here, path.parent, self._command(path, STEPS), paced=case.paced)
            limits = HostLimits(cpus=fault.cpus[:hosts])
            real = replace(
                real,
                spec=replace(real.spec, env={**real.spec.env, **env}, limits=limits),
                rate_bps=self._rate_bps(real, fault),
                shaped=True,
            )
            alone = hosts == 1 and fault.settings.startswith("zero_stage")  # one rank has nobody to share with
            plan = here.job.scenario([fault.settings] if fault.settings and not alone else []).plan
            with programs(fault):
                run = real.run(plan, warmup=WARMUP, timeout_s=300)
            return run.times.iteration_us / 1e6, float((work / "product").read_text())

    def _all_reduce_bytes_per_s(self, name: str, fault: Fault) -> float:
        """Bus bandwidth of an all-reduce of both ranks."""
        path = self.job_file(name)
        source = load_source(path)
        assert isinstance(source, Description)
        real: RecordedJob = described_job(source, job_of(source), path.parent, self._command(path, STEPS))
        spec = replace(real.spec, limits=HostLimits(cpus=fault.cpus))
        with programs(fault):
            rows = timed_exchanges(
                spec, rate_bps=self._rate_bps(real, fault), shaped=True, sizes_bytes=(ALL_REDUCE_BYTES // 4, ALL_REDUCE_BYTES)
            )
        us = next(row.us for row in rows if row.collective == "all_reduce" and row.size_bytes == ALL_REDUCE_BYTES)
        return ALL_REDUCE_BYTES / us * 1e6  # 2 (n - 1) / n is 1 for two ranks

    @staticmethod
    def _rate_bps(real: RecordedJob, fault: Fault) -> float | None:
        return None if real.rate_bps is None else real.rate_bps * fault.rate_share

    def _command(self, path: Path, steps: int) -> list[str]:
        return [self._python, "-W", "ignore", str(TRAIN), str(path.parent.resolve() / "config.json"), str(steps)]


@contextmanager
def programs(fault: Fault) -> Iterator[None]:
    """Other programs of a fault, which compute on every core."""
    busy = [
        subprocess.Popen(
            ["taskset", "-c", str(core), "nice", "-n", str(fault.niceness), sys.executable, "-c", "while True: pass"],
        )
        for core in range(cores_of())
        for _ in range(fault.programs)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
