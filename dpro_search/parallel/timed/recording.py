"""`record_times`: times the blocks of a described job, and its exchanges, on this machine; `paced_times`: as paced ranks read them.

Blocks are timed by the user's own script under an exported plan, one process on each core that the job would use, or one on a GPU,
on a fake process group: shapes, layouts and the framework's own work are those of a rank, and nothing is waited for. The script
takes as many sequences as the plan says (``planned.sequences``). On a GPU plans are timed as they are, with recomputation and with
all stages of ZeRO, for their memory; those with a pipeline have all layers on one rank.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.netns import shaped_hosts
from dpro_search.collect.launch.ranks import JobSpec, require_framework, run_ranks
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.tables.parallel_times import BlockTime, CollectiveTime, ParallelTimes, TimedStep, UpdateTime
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.jobs import RecordedJob, with_exported, with_observer
from dpro_search.errors import InputError, JobError
from dpro_search.measure.campaign import Campaign, Progress
from dpro_search.parallel.file.description import ParallelDescription
from dpro_search.parallel.model import blocks_of
from dpro_search.parallel.prepared import PreparedJob
from dpro_search.parallel.settings import resolved, settings_of
from dpro_search.parallel.strategy import ParallelSettings, Recompute, Strategy
from dpro_search.runtime import WORKERS
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario

_STEPS = 11  # that are needed: those of runtime/timed/dpro_search_timed.py, and the begin of one more
_MICRO_BATCHES = 3  # of a timed step: the first, a usual one, and the last one
_OF_A_CORE = ("memory_bytes_per_s", "flops_per_s", "split_forward_us", "split_backward_us")
_SECONDS = 600.0  # that timing the blocks of one plan may take
SIZES_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)  # of exchanges
_POINT_SECONDS = 0.25  # for an exchange of one size in one group
_MESSAGES = {"send_recv": 2}  # that one call is


def record_times(
    job: PreparedJob,
    real: RecordedJob,
    plans: Sequence[Plan],
    out: Path,
    *,
    exchanges: bool = True,
    on_start: Callable[[str], None] = lambda what: None,
) -> ParallelTimes:
    """Time the blocks as each plan cuts them, and the exchanges of groups; adds to the file `out`, or writes it.

    Parameters
    ----------
    real
        The job as it runs here.
    on_start
        Called with what is timed next.
    exchanges
        Whether to time them; False: cost models say what they take.

    Raises
    ------
    InputError
        A plan is impossible, or the model has layers that differ.
    JobError
        The script failed, runs too few steps, or follows no plan.
    """
    campaign = _JobTimes(job, real, plans, out, exchanges, on_start)
    campaign.run()
    campaign.times.save(out)
    return campaign.times


class _JobTimes(Campaign["PreparedJob | int", Progress]):
    """Blocks as plans cut them, each timed as the job of one rank, then the exchanges of a number of ranks."""

    def __init__(
        self,
        job: PreparedJob,
        real: RecordedJob,
        plans: Sequence[Plan],
        out: Path,
        exchanges: bool,
        on_start: Callable[[str], None],
    ) -> None:
        super().__init__(Progress(), lambda progress: on_start(progress.now))
        self._job, self._real, self._plans, self._out, self._exchanges = job, real, plans, out, exchanges
        self._cores = len(set(real.spec.cores)) or 1
        self._on_gpu = job.description.device.kind == "gpu"
        times = ParallelTimes.load(out) if out.exists() else ParallelTimes()
        facts = {"machine": platform.node(), "precision": job.description.precision, "cores": self._cores}
        self.times = msgspec.structs.replace(times, **facts)

    def missing(self) -> Iterator[PreparedJob | int]:
        for plan in self._plans:
            alone = alone_job(self._job.description, self._job.workload(plan).strategy, on_gpu=self._on_gpu)
            steps = [step.settings for step in self.times.steps]
            if not (_settings(alone.description.strategy) in steps if self._on_gpu else self._has_blocks_of(alone)):
                yield alone
        world, rate_bps = self._real.spec.ranks, self._real.rate_bps
        known = any(row.world == world and row.rate_bps == rate_bps for row in self.times.collectives)
        if self._exchanges and world > 1 and not known:
            yield world

    def measure(self, item: PreparedJob | int) -> None:
        if isinstance(item, int):
            self.announce(f"exchanges of {item} ranks")
            rows = timed_exchanges(self._real.spec, rate_bps=self._real.rate_bps, shaped=self._real.shaped)
            self.times = self.times.with_rows(collectives=rows)
        else:
            self.announce(f"blocks of {_text(item.description.strategy)}")
            self._add(item, _timed(item, self._real, self._cores))
        self.times.save(self._out)

    def _add(self, alone: PreparedJob, content: list[dict[str, Any]]) -> None:
        """Add the records of the processes that ran the blocks of a job."""
        times, strategy, new = self.times, alone.description.strategy, not self._has_blocks_of(alone)
        rows = tuple(_blocks(alone.description, content))
        if self._on_gpu:
            step = _step(strategy, content, rows)
            times = _on(times, content[0]).with_rows(steps=[step], updates=[beside_passes(alone, step, content[0]["elements"])])
            rows = tuple(msgspec.structs.replace(row, reduce_us=0.0) for row in rows)
        else:
            times = times.with_rows(updates=_updates(content))
        if strategy.recompute is not Recompute.FULL:
            times = times.with_rows(blocks=rows)
        elif new:
            times = times.with_rows(blocks=[_without_recomputation(row, alone) for row in rows])
        of_core = {name: max(float(np.median([run[name] for run in content])), 0.0) for name in _OF_A_CORE}
        self.times = msgspec.structs.replace(times, **of_core)

    def _has_blocks_of(self, alone: PreparedJob) -> bool:
        return _key_of_job(alone) in map(_key, self.times.blocks)


def paced_times(job: PreparedJob, plan: Plan) -> bytes:
    """Input of paced ranks (`runtime/timed/dpro_search_paced.py`): predicted times of a rank's own work."""
    times = job.workload(plan).times
    assert times is not None, "paced jobs have recorded times"
    times_of_block = {
        name: [each.forward_us, each.backward_us, each.reduce_us, each.spread] for name, each in job.rank_work(plan).items()
    }
    embedding, *layers, head = [
        times_of_block[block.name] for block in blocks_of(job.description.fixed.model) for _ in range(block.count)
    ]
    return json.dumps({"embedding": embedding, "layers": layers, "head": head, "update_us": times.update}).encode()


def alone_job(description: ParallelDescription, strategy: Strategy, *, on_gpu: bool) -> PreparedJob:
    """The job under the strategy without a pipeline, with few micro-batches; on cores as plain as its work allows."""
    if on_gpu:
        runs = msgspec.structs.replace(settings_of(strategy), pp=1, virtual_stages=1, stage_layers=(), schedule="1f1b")
    else:
        runs = ParallelSettings(
            tp=strategy.tp,
            dp=strategy.dp,
            sequence_parallel=strategy.sequence_parallel,
            micro_batch=strategy.micro_batch,
            zero_stage=strategy.zero_stage if strategy.zero_stage in (0, 3) else 0,  # type: ignore[arg-type]
        )
    count = min(strategy.micro_batches, _MICRO_BATCHES)
    fixed = replace(description.fixed, devices=strategy.tp * strategy.dp, global_batch=strategy.dp * strategy.micro_batch * count)
    alone = replace(description, fixed=fixed, runs=runs, strategy=resolved(runs, fixed), chosen=False)
    return PreparedJob(alone, Scenario())


def _timed(alone: PreparedJob, real: RecordedJob, cores: int) -> list[dict[str, Any]]:
    """The records that each process wrote."""
    devices = alone.description.fixed.devices
    require_framework(real.spec.interpreter, ("torch",), "torch")
    with scratch_folder("blocks") as work:
        exported = export_plan(Plan(), work / "plan", real.targets, replace(real.facts, workload=alone.workload))
        report = work / "report"
        report.mkdir()
        spec = with_observer(with_exported(real.spec, exported, report), "timed", work / "blocks.json")
        spec = replace(spec, ranks=cores, ranks_per_host=1, cores=real.spec.cores[:cores], timeout_s=_SECONDS)
        threads = {"OMP_NUM_THREADS": "1"} if spec.cores else {}
        rank = {"RANK": "0", "WORLD_SIZE": str(devices), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(devices)}
        run_ranks(spec, work / "out", [{**threads, **rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} for _ in range(cores)])
        files = sorted(work.glob("blocks.*.json"))
        if not files:
            raise JobError(f"timing blocks: the script ended before {_STEPS} steps, or does not follow parallel_plan.py")
        return [json.loads(file.read_text()) for file in files]


def _blocks(description: ParallelDescription, content: Sequence[dict[str, Any]]) -> Iterator[BlockTime]:
    """Means over processes and steps; of a block that comes several times, of all of these."""
    strategy = description.strategy
    passes: dict[tuple[int, bool], list[list[float]]] = {}  # of each block, by micro-batch, then by step and process
    for run in content:
        for step in run["steps"]:
            rows: dict[tuple[int, bool], list[float]] = {}
            for block, forward, us in step["passes"]:
                rows.setdefault((block, forward), []).append(us)
            for key, values in rows.items():
                passes.setdefault(key, []).append(values)
    first = 0
    for block in blocks_of(description.fixed.model):
        numbers = range(first, first + block.count)
        first += block.count
        if any((number, forward) not in passes for number in numbers for forward in (True, False)):
            raise JobError(f"timing blocks: nothing was seen of {block.name}; is the model the one of the job's file?")
        forward = [_Passes.of(passes[number, True]) for number in numbers]
        backward = [_Passes.of(passes[number, False]) for number in numbers]
        yield BlockTime(
            block=block.name,
            tp=strategy.tp,
            sequence_parallel=strategy.sequence_parallel,
            micro_batch=strategy.micro_batch,
            sequence=description.fixed.sequence,
            sharded=strategy.zero_stage == 3,
            forward_us=float(np.mean([each.us for each in forward])),
            backward_us=float(np.mean([each.us for each in backward])),
            reduce_us=0.0 if strategy.zero_stage == 3 else max(float(np.mean([each.last_us - each.us for each in backward])), 0.0),
            spread=float(np.mean([each.spread for each in (*forward, *backward)])),
        )


class _Passes(NamedTuple):
    """Times of a block's passes: of a usual micro-batch, of the last one of a step, and the relative deviation of the usual ones.

    The first micro-batches add no gradients to others. A step waits for every pass, so that means count; the longest is left out,
    for now and then a machine stalls.
    """

    us: float
    last_us: float
    spread: float

    @staticmethod
    def of(rows: Sequence[Sequence[float]]) -> _Passes:
        of_each = np.sort(np.array(rows), axis=0)[: max(len(rows) - 1, 1)]
        usual = of_each[:, 1:-1] if of_each.shape[1] > 2 else of_each[:, :1]
        mean_us = float(usual.mean())
        return _Passes(mean_us, float(of_each[:, -1].mean()), float(usual.std(axis=0).mean()) / mean_us if mean_us > 0 else 0.0)


def _updates(content: Sequence[dict[str, Any]]) -> Iterator[UpdateTime]:
    us = [step["rest_us"] for run in content for step in run["steps"] if "rest_us" in step]
    yield UpdateTime(elements=float(content[0]["elements"]), us=float(np.mean(np.sort(us)[: max(len(us) - 1, 1)])))


def _without_recomputation(row: BlockTime, alone: PreparedJob) -> BlockTime:
    """A block whose backward pass was timed with another forward pass in it, of some layers or all."""
    if not row.block.startswith("layer"):
        return row
    layers = alone.description.fixed.layer_count or 1
    share = min(alone.description.strategy.recompute_layers or layers, layers) / layers
    return msgspec.structs.replace(row, backward_us=max(row.backward_us - share * row.forward_us, 0.0))


def _step(strategy: Strategy, content: Sequence[dict[str, Any]], rows: tuple[BlockTime, ...]) -> TimedStep:
    """Records of one process, which has a GPU."""
    (run,) = content
    return TimedStep(
        settings=_settings(strategy),
        micro_batches=strategy.micro_batches,
        step_us=float(np.median([step["step_us"] for step in run["steps"]])),
        update_us=float(np.median([step["rest_us"] for step in run["steps"]])),
        peak_bytes=run["peak_bytes"],
        blocks=rows,
        finite=all(step["finite"] for step in run["steps"]),
    )


def beside_passes(alone: PreparedJob, step: TimedStep, elements: float) -> UpdateTime:
    """Time of a GPU's step in addition to the passes of usual micro-batches.

    The update; what the first micro-batch has to gather and to cast, and what the last one hands over to be exchanged.
    """
    counts = {block.name: block.count for block in blocks_of(alone.description.fixed.model)}
    passes_us = sum(counts[row.block] * (row.forward_us + row.backward_us) for row in step.blocks)
    return UpdateTime(elements=elements, us=step.update_us + max(step.step_us - step.micro_batches * passes_us, 0.0))


def _settings(strategy: Strategy) -> dict[str, Any]:
    """Those that are not usual."""
    usual = settings_of(Strategy(global_batch=strategy.global_batch)).settings
    kept = ("tp", "dp", "micro_batch", "zero_stage")
    return {name: value for name, value in settings_of(strategy).settings.items() if name in kept or value != usual[name]}


def _on(times: ParallelTimes, run: dict[str, Any]) -> ParallelTimes:
    """With the GPU that a process ran on; raises `InputError` where other times are another one's."""
    if times.device not in ("", run["device"]):
        raise InputError(f"--out: its times are those of {times.device}, and this machine has {run['device']}: name another file")
    return msgspec.structs.replace(times, device=run["device"], torch=run["torch"])


def _key(row: BlockTime) -> tuple[Any, ...]:
    return row.tp, row.sequence_parallel, row.micro_batch, row.sequence, row.sharded


def _key_of_job(alone: PreparedJob) -> tuple[Any, ...]:
    strategy, sequence = alone.description.strategy, alone.description.fixed.sequence
    return strategy.tp, strategy.sequence_parallel, strategy.micro_batch, sequence, strategy.zero_stage == 3


def _text(strategy: Strategy) -> str:
    zero = f", ZeRO-{strategy.zero_stage}" if strategy.zero_stage else ""
    again = ", recomputation" if strategy.recompute is Recompute.FULL else ""
    return f"tp {strategy.tp}, micro-batch {strategy.micro_batch}{zero}{again}"


def timed_exchanges(
    spec: JobSpec,
    *,
    rate_bps: float | None,
    shaped: bool,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> list[CollectiveTime]:
    """Times of exchanges of groups of ranks on Gloo, on hosts and links like those of a job: a job of exchanges only runs.

    `spec` is that of the job which is to be predicted, of which only the interpreter runs.

    Raises
    ------
    JobError
        A rank failed.
    MissingCapabilityError
        The framework, or a permission for hosts with links, is missing.
    """
    require_framework(spec.interpreter, ("torch",), "torch")
    groups = tuple(_groups(spec.ranks))
    with scratch_folder("exchanges") as work, shaped_hosts(spec.hosts, rate_bps, shaped, spec.limits) as hosts:
        out = work / "times"
        command = (
            *(spec.interpreter, str(WORKERS / "dpro_search_mesh_worker.py"), str(out)),
            *(",".join(f"{stride}x{size}" for stride, size in groups), ",".join(map(str, sizes_bytes)), str(_POINT_SECONDS)),
        )
        run_torch_ranks(replace(spec, command=command), work, hosts=hosts)
        files = [Path(f"{out}-{rank}.json") for rank in range(spec.ranks)]
        if not all(file.is_file() for file in files):
            raise JobError("timing exchanges: a rank wrote nothing")
        rows = [msgspec.json.decode(read_regular(file), type=list[_Point]) for file in files]
    per_host = spec.ranks_per_host if shaped else spec.ranks
    return list(_times(rows, spec.ranks, per_host, rate_bps))


def _groups(world: int) -> Iterator[tuple[int, int]]:
    """Strides and sizes of groups that a mesh of so many ranks can have."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for stride in divisors:
        yield from ((stride, size) for size in divisors if size > 1 and world % (stride * size) == 0)


class _Point(NamedTuple):
    """Calls of one exchange in all groups of a stride and size, as one rank saw them."""

    name: str
    stride: int
    size: int
    size_bytes: float
    spans_us: list[tuple[float, float]]  # Begin and end of each call.


def _times(rows: Sequence[Sequence[_Point]], world: int, per_host: int, rate_bps: float | None) -> Iterator[CollectiveTime]:
    """From the last begin of a group's ranks to its last end: means of calls, and over groups that are alike on the hosts.

    A step waits for every exchange, so that means count; the longest call is left out, for now and then a machine stalls.
    """
    times_of: dict[tuple[str, int, int, float], list[float]] = {}
    for points in zip(*rows, strict=True):
        name, stride, size, size_bytes, _ = points[0]
        taking = 2 if name == "send_recv" else size
        for first in (block + start for block in range(0, world, stride * size) for start in range(stride)):
            ranks = range(first, first + stride * taking, stride)
            spans = np.array([points[rank].spans_us for rank in ranks])
            each_us = spans[:, :, 1].max(axis=0) - spans[:, :, 0].max(axis=0)
            usual = each_us < each_us.max() if len(set(each_us)) > 1 else np.ones(len(each_us), bool)
            us = float(each_us[usual].mean())
            hosts = len({rank // per_host for rank in ranks})
            times_of.setdefault((name, taking // hosts, hosts, size_bytes), []).append(us / _MESSAGES.get(name, 1))
    for (name, on_host, hosts, size_bytes), us_of_groups in times_of.items():
        yield CollectiveTime(
            collective=name,
            ranks_per_host=on_host,
            hosts=hosts,
            world=world,
            rate_bps=rate_bps,
            size_bytes=size_bytes,
            us=float(np.mean(us_of_groups)),
        )
