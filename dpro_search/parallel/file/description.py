"""``job.toml``: a parallel job as it is written down, and `described` to read it.

    model = "llama3-8b"           # a built-in name, or the path of a config.json of Hugging Face
    cluster = "4xhgx-h100"
    global_batch = 512            # sequences
    sequence = 8192               # tokens

    [runs]                        # how it runs today; without this table: a usual strategy that fits in memory
    tp = 2

Every error is one line with the file, the line and the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dpro_search._regular_files import read_regular
from dpro_search._toml import TomlFile
from dpro_search.cluster import Cluster, Device, parse_cluster
from dpro_search.cluster.link import BETWEEN, INSIDE
from dpro_search.cluster.names import file_beside
from dpro_search.collect.capture import read_graph
from dpro_search.collect.tables.parallel_times import ParallelTimes
from dpro_search.errors import InputError
from dpro_search.kinds._kind import Description
from dpro_search.parallel.captured import captured_model
from dpro_search.parallel.costs.block_times import BlockTimes
from dpro_search.parallel.costs.pricer import NO_HOST_LINK
from dpro_search.parallel.costs.recorded import RecordedTimes
from dpro_search.parallel.costs.step_end import NO_HOST_RATE
from dpro_search.parallel.file.job_devices import CPU_FRAMEWORK, other_device, with_known_devices
from dpro_search.parallel.file.keys import JobToml, ModelTable, Precision, converted, fail_at_setting, unknown_text
from dpro_search.parallel.file.usual_strategy import usual_strategy
from dpro_search.parallel.frameworks import FRAMEWORKS, ON_WHEELS, as_compiled, as_of_version, with_attention, with_cuda, with_loss
from dpro_search.parallel.gpu_ops import achieved_by, capped_clock
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.model import (
    TARGETS,
    Adapters,
    Architecture,
    CapturedModel,
    Model,
    blocks_of,
    check_targets,
    from_config,
    parameters_of,
)
from dpro_search.parallel.model import model as built_in
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.settings import OFFLOADS, Fixed, resolved
from dpro_search.parallel.strategy import ParallelSettings, Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.space.cluster import spec_on

KEYS = ("model", "global_batch", "sequence")  # any of them marks a description
MOST = 10**9  # sequences, samples, tokens
CAPTURED = {
    "optimizer_state": "its optimizer's states",
    "main_parameters": "its optimizer's states",
    "attention": "its kernels",
    "loss": "its loss",
}
"""Keys that say what a captured model says itself."""
_USUAL_RANK = 16  # of adapters, to say what a blank leaves out
_LONGEST_US = 1e12


@dataclass(frozen=True, kw_only=True)
class ParallelDescription(Description):
    """The content of a file, with the values that follow from it."""

    fixed: Fixed
    cluster: Cluster
    precision: Precision
    measured: tuple[BlockTimes, ...] = ()
    runs: ParallelSettings
    strategy: Strategy  # That of `runs`.
    chosen: bool = False  # Whether the file leaves open how the job runs, so that `runs` was chosen.
    keys: JobToml  # The file's, of which other fields are what a scenario may change.
    batch_per_replica: int | None = None  # Sequences of one replica, if the file gives these in place of the whole batch.
    times: ParallelTimes | None = None
    cores: int | None = None

    def workload(self, strategy: Strategy) -> Workload:
        """The job under a strategy."""
        return Workload(
            model=self.fixed.model,
            sequence=self.fixed.sequence,
            strategy=strategy,
            cluster=self.cluster,
            precision=self.precision,
            runtime=self.runtime,
            measured=self.measured,
            times=self._recorded,
            cores=self.cores or 0,
        )

    @property
    def device(self) -> Device:
        """The device that a rank computes on."""
        return self.cluster.groups[0].host.device

    @property
    def is_recorded(self) -> bool:
        """Whether the model or its times come from the job itself, as eager or compiled as it is."""
        return isinstance(self.fixed.model, CapturedModel) or self.times is not None

    @property
    def gpu_vendor(self) -> str:
        """The vendor of the device, if it is a GPU."""
        return self.device.vendor if self.device.kind == "gpu" else ""

    @property
    def _recorded(self) -> RecordedTimes | None:
        if self.times is None:
            return None
        return RecordedTimes(self.times, spec_on(self.cluster, self.fixed.devices).spec.rate_bps, self.fixed.devices)

    @property
    def runtime(self) -> Runtime:
        """Behaviour of the framework, with the bytes of parameters and of the optimizer's state of a captured model."""
        return runtime_of(self.keys, self.fixed.model, self.precision, self.device)

    @property
    def possible_runtimes(self) -> tuple[Runtime, ...]:
        """Beside `runtime`, eager and compiled, and with old libraries, where the file does not say which the job has."""
        if self.is_recorded:
            return ()
        runtimes = [self.runtime]
        if self.keys.compiled is None and FRAMEWORKS[self.framework].compiles:
            runtimes = [as_compiled(self.runtime, compiled=compiled) for compiled in (False, True)]
        if self.keys.cuda is None and self.framework in ON_WHEELS and achieved_by(self.device).wheels < 1:
            runtimes += [replace(each, kernels=replace(each.kernels, wheels=True)) for each in runtimes]
        return tuple(runtimes) if len(runtimes) > 1 else ()


def options_on(framework: str, cluster: Cluster) -> dict[str, int | str]:
    """`Fixed.options` of a framework on a cluster."""
    host, options = cluster.groups[0].host, dict[str, int | str](FRAMEWORKS[framework].options)
    for name in OFFLOADS:
        if name in options and host.copy_bytes_per_s is None:
            options[name] = NO_HOST_LINK
    if host.memory_bytes_per_s is None and isinstance(options.get("offload_optimizer"), int):
        options["offload_optimizer"] = NO_HOST_RATE
    return options


def global_batch_of(per_replica: int, runs: ParallelSettings | None, devices: int) -> int:
    """The batch of all replicas that some devices have room for."""
    ways = 1 if runs is None else (runs.tp or 1) * (runs.pp or 1) * (runs.cp or 1)
    return per_replica * max(devices // ways, 1)


def runtime_of(keys: JobToml, model: Model, precision: Precision, device: Device) -> Runtime:
    """See `ParallelDescription.runtime`; raises `InputError`, which begins with a key, where the device cannot run it."""
    runtime = FRAMEWORKS[keys.framework].runtime
    if keys.framework_version is not None:
        try:
            runtime = as_of_version(FRAMEWORKS[keys.framework], keys.framework_version)
        except InputError as error:
            raise InputError(f"framework_version {error}") from error
    if keys.cuda is not None:
        if keys.framework not in ON_WHEELS:
            raise InputError(f"cuda: {keys.framework} is not predicted by it; leave it out")
        runtime = with_cuda(runtime, keys.cuda)
    if keys.compiled is not None:
        runtime = as_compiled(runtime, compiled=keys.compiled)
    if keys.loss is not None:
        runtime = with_loss(runtime, keys.loss)
    if keys.attention is not None:
        try:
            runtime = with_attention(runtime, keys.attention, device)
        except InputError as error:
            raise InputError(f"attention {keys.attention}: {error}") from error
    optimizer_bytes = keys.optimizer_bytes(runtime)
    if optimizer_bytes is not None:
        runtime = replace(runtime, optimizer_bytes=optimizer_bytes)
    if not isinstance(model, CapturedModel):
        return runtime
    held = 4.0 if precision in ("fp32", "tf32") else 2.0  # of a parameter, beside the optimizer's state
    beside = model.parameter_bytes - held if model.parameter_bytes > held else 0.0
    return replace(runtime, gradient_bytes=model.gradient_bytes, optimizer_bytes=beside + model.state_bytes)


def described(path: Path) -> ParallelDescription | None:
    """The job that a file describes; None: it describes something else.

    Raises
    ------
    InputError
        Something in it is wrong or impossible.
    """
    if path.suffix.lower() != ".toml":
        return None
    file = TomlFile(path)
    values = file.values()
    table = values.get("model")
    another = isinstance(table, Mapping) and not table.keys() & {*ModelTable.__struct_fields__}
    if another or not any(key in values for key in KEYS):
        return None
    job_file = converted(file, values)
    files: dict[str, Path] = {}
    model, warnings = _model(file, job_file, files)
    cluster = _cluster(file, job_file.cluster, files)
    times = _times(file, job_file, files)
    if times is not None and times.device:
        warnings = (*warnings, *filter(None, [other_device(cluster.groups[0].host.device, times.device)]))
    if job_file.framework == CPU_FRAMEWORK and times is None:
        warnings = (*warnings, "no times were recorded, and nobody measured such a job: only their order may be trusted")
    warnings = (*warnings, *_about_cluster(cluster, files.get("cluster_file")))
    framework = FRAMEWORKS.get(job_file.framework)
    if framework is None:
        file.fail("framework", unknown_text(job_file.framework, tuple(FRAMEWORKS)))
    if job_file.compiled is not None and not framework.compiles:
        those = ", ".join(name for name, each in FRAMEWORKS.items() if each.compiles)
        file.fail("compiled", f"{job_file.framework} has no eager and compiled form (those that have: {those}); leave it out")
    if job_file.compiled is None and framework.compiles and times is None and not isinstance(model, CapturedModel):
        warnings = (*warnings, "'compiled' is not given: the interval holds eager and compiled (torch.compile) steps")
    if job_file.frozen_weights and not job_file.trains_adapters:
        file.fail("frozen_weights", "only a job with lora_rank, or adapters = true, leaves the model's weights as they are")
    if job_file.trains_adapters:
        model, more = _with_adapters(file, job_file, model)
        warnings = (*warnings, *more)
    if job_file.frozen_weights:
        warnings = (*warnings, "jobs with quantized weights mostly took 8 to 18 % more memory on published runs than is predicted")
    if isinstance(model, CapturedModel):
        for key, what in CAPTURED.items():
            if getattr(job_file, key) is not None:
                file.fail(key, f"a captured model has {what}; leave it out")
    if job_file.loss is not None and not framework.compiles:
        those = ", ".join(name for name, each in FRAMEWORKS.items() if each.compiles)
        file.fail("loss", f"{job_file.framework} has a loss of its own (those that have PyTorch's: {those}); leave it out")
    if job_file.attention in ("flash2", "sdpa") and cluster.groups[0].host.device.peak.fp4 is not None:
        slower = "how much slower flash-attention 2 is than Blackwell's fastest kernels is not known: it is taken to be as fast"
        warnings = (*warnings, slower)
    try:
        cluster = with_known_devices(cluster, job_file.precision, job_file.framework, times)
    except InputError as error:
        file.fail("precision" if "its peak" in str(error) else "cluster", str(error))
    has_tokens = model.sequence is not None if isinstance(model, CapturedModel) else isinstance(model, Architecture)
    if job_file.sequence is None and has_tokens:
        file.fail("", "'sequence' is missing; 'dpro-search describe' writes a complete file")
    if (job_file.global_batch is None) is (job_file.batch_per_replica is None):
        file.fail("", "one of 'global_batch' and 'batch_per_replica' is needed; 'dpro-search describe' writes a complete file")
    for key in ("global_batch", "batch_per_replica", "sequence", "cores"):
        value = getattr(job_file, key)
        if value is not None and not 0 < value <= MOST:
            file.fail(key, f"must be from 1 to 1e9, not {value}")
    fixed = Fixed(
        model=model,
        sequence=(job_file.sequence or 1) if has_tokens else 1,
        global_batch=job_file.global_batch or global_batch_of(job_file.batch_per_replica or 1, job_file.runs, cluster.ranks),
        devices=cluster.ranks,
        zero_stage=framework.zero_stage,
        splits=framework.splits,
        options=options_on(job_file.framework, cluster),
        stages_by_cost=framework.runtime.stages_by_cost,
    )
    runs = job_file.runs
    splits_experts = job_file.framework.startswith("megatron-core") and fixed.experts > 0
    if splits_experts and runs is not None and (runs.tp or 1) > 1 and not runs.etp:
        said = "'etp' is not given: each expert is whole on its rank; Megatron-Core without --expert-tensor-parallel-size"
        warnings = (*warnings, f"{said} splits it over as many as tp (etp = {runs.tp})")
    measured = _measured(file, job_file.model, fixed) if isinstance(job_file.model, ModelTable) else ()
    try:
        runtime = runtime_of(job_file, model, job_file.precision, cluster.groups[0].host.device)
        if runs is None:
            runs = usual_strategy(fixed, cluster, job_file.precision, runtime, job_file.framework)
        strategy = resolved(runs, fixed)
    except InputError as error:
        fail_at_setting(file, str(error), values)
    if strategy.pp > 1 and strategy.schedule not in framework.schedules:
        has = ", ".join(framework.schedules)
        warnings = (*warnings, f"{job_file.framework} has no schedule {strategy.schedule} (it has {has}): only its order is taken")
    return ParallelDescription(
        framework=job_file.framework,
        provenance=_provenance(job_file, fixed, cluster, strategy),
        warnings=warnings,
        files=files,
        fixed=fixed,
        cluster=cluster,
        precision=job_file.precision,
        measured=measured,
        runs=runs,
        strategy=strategy,
        chosen=job_file.runs is None,
        batch_per_replica=job_file.batch_per_replica,
        keys=job_file,
        times=times,
        cores=job_file.cores,
    )


def _times(file: TomlFile, job_file: JobToml, files: dict[str, Path]) -> ParallelTimes | None:
    if job_file.times is None:
        return None
    path = file.path.parent / job_file.times
    if not path.exists():  # before it is recorded
        return None
    try:
        times = ParallelTimes.load(path)
    except InputError as error:
        file.fail("times", str(error))
    if times.precision != job_file.precision:
        file.fail("times", f"{job_file.times} was recorded in {times.precision}, and the job runs in {job_file.precision}")
    files["times"] = path
    return times


def model_of(name: str, folder: Path = Path()) -> tuple[Model, Path | None]:
    """The model of a built-in name or of a ``config.json``, and that file; raises `InputError`."""
    if not name.lower().endswith(".json") and "/" not in name:
        return built_in(name), None
    path = folder / name
    try:
        values = msgspec.json.decode(read_regular(path), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{path}: not a config.json of a model: {reason}") from error
    return from_config(values, str(path)), path


def _model(file: TomlFile, job_file: JobToml, files: dict[str, Path]) -> tuple[Model, tuple[str, ...]]:
    """The model, and what to warn of."""
    table = job_file.model if isinstance(job_file.model, ModelTable) else ModelTable(name=job_file.model)
    if table.capture is not None:
        for key in ("name", "times"):
            if getattr(table, key):
                file.fail(f"model.{key}", "goes with a model that is named: a captured one has its own")
        if job_file.tied_embeddings is not None:
            file.fail("tied_embeddings", "goes with a model that is named: a captured one has its own")
        return _captured(file, table.capture, job_file.precision, files)
    if table.name is None:
        file.fail("model", "needs 'name', a built-in model or a config.json, or 'capture', a graph.json")
    try:
        model, path = model_of(table.name, file.path.parent)
    except InputError as error:
        file.fail("model" if isinstance(job_file.model, str) else "model.name", str(error))
    if path is not None:
        files["model_config"] = path
    if job_file.tied_embeddings is not None:
        if not isinstance(model, Architecture):
            file.fail("tied_embeddings", f"{model.name} has no embedding that a head could use: leave it out")
        model = replace(model, tied=job_file.tied_embeddings)
    return _with_targets(file, job_file, model) if isinstance(model, Architecture) else (model, ())


def _with_targets(file: TomlFile, job_file: JobToml, model: Architecture) -> tuple[Architecture, tuple[str, ...]]:
    """The model whose decoder reads as many tokens as the file says, and what to warn of."""
    reads_encoder = any(layer.cross_attention is not None for layer in model.layers)
    if job_file.target_sequence is not None:
        if not reads_encoder:
            file.fail("target_sequence", f"{model.name} has no encoder whose output a decoder reads: leave it out")
        if not 0 < job_file.target_sequence <= (job_file.sequence or MOST):
            file.fail("target_sequence", f"must be from 1 to 'sequence', not {job_file.target_sequence}")
        return replace(model, target_share=job_file.target_sequence / (job_file.sequence or 1)), model.assumed
    said = "'target_sequence' is not given: the decoder is taken to read as many tokens as the encoder" if reads_encoder else None
    return model, (*model.assumed, *filter(None, [said]))


def _with_adapters(file: TomlFile, job_file: JobToml, model: Model) -> tuple[Model, tuple[str, ...]]:
    """The model of which only adapters are trained, and what to warn of."""
    key = "adapters" if job_file.adapters else "lora_rank" if job_file.lora_rank is not None else "lora_targets"
    if not isinstance(model, Architecture):
        text = "a captured model says itself which of its parameters are trained" if isinstance(model, CapturedModel) else ""
        file.fail(key, f"{text or f'{model.name} has no layers of a transformer'}; leave it out")
    rank, targets = job_file.lora_rank, job_file.lora_targets
    for target in targets:
        if target not in TARGETS:
            file.fail("lora_targets", unknown_text(target, tuple(TARGETS)))
    if rank is not None and not 0 < rank <= model.hidden:
        file.fail("lora_rank", f"must be from 1 to the hidden size {model.hidden}, not {rank}")
    adapters = Adapters(rank=rank or 0, targets=targets if rank else (), frozen_bytes=job_file.frozen_bytes)
    try:
        check_targets(blocks_of(model), adapters)
    except InputError as error:
        file.fail("lora_targets", str(error))
    if rank and targets:
        return replace(model, adapters=adapters), ()
    blank = " and ".join(f"'{name}'" for name, value in (("lora_rank", rank), ("lora_targets", targets)) if not value)
    of_attention = replace(model, adapters=Adapters(rank=rank or _USUAL_RANK, targets=("linear_qkv", "linear_proj")))
    millions = (parameters_of(of_attention) - parameters_of(model)) / 1e6
    said = f"of rank {rank or _USUAL_RANK} on attention they have {millions:.3g} million parameters, and products of their own"
    return replace(model, adapters=replace(adapters, rank=0, targets=())), (
        f"{blank} not given: the adapters themselves are not counted; {said}",
    )


def _measured(file: TomlFile, table: ModelTable, fixed: Fixed) -> tuple[BlockTimes, ...]:
    """Times of blocks; each under a strategy that is legal."""
    names = [block.name for block in blocks_of(fixed.model)]
    layers = any(name.startswith("layer") for name in names)
    measured = []
    for number, row in enumerate(table.times, 1):
        where = f"model.times, table {number}:"
        if row.block not in names and not (layers and row.block == "layer"):
            file.fail("model.times", f"{where} block {unknown_text(row.block, tuple(names))}")
        for name in ("forward_us", "backward_us"):
            if not 0 < getattr(row, name) < _LONGEST_US:
                file.fail("model.times", f"{where} {name} must be above 0 and below {_LONGEST_US:g}, not {getattr(row, name):g}")
        sequence = fixed.sequence if row.sequence is None else row.sequence
        for name, value in (("sequence", sequence), *((name, getattr(row, name)) for name in ("micro_batch", "tp", "cp", "ep"))):
            if not 0 < value <= MOST:
                file.fail("model.times", f"{where} {name} must be from 1 to {MOST:g}, not {value}")
        times = BlockTimes(**{**msgspec.structs.asdict(row), "sequence": sequence})
        try:
            if times.strategy.devices > fixed.devices:
                raise InputError(f"it was measured on {times.strategy.devices} ranks, and the cluster has {fixed.devices} devices")
            check_strategy(times.strategy, fixed.model, sequence)
        except InputError as error:
            file.fail("model.times", f"{where} {error}")
        measured.append(times)
    return tuple(measured)


def _captured(file: TomlFile, capture: str, precision: Precision, files: dict[str, Path]) -> tuple[Model, tuple[str, ...]]:
    path = file.path.parent / capture
    try:
        graph = read_graph(path)
        model = captured_model(graph)
    except InputError as error:
        file.fail("model.capture", str(error))
    if graph.precision != precision and (graph.precision, precision) != ("fp32", "tf32"):
        file.fail("precision", f"{capture} was captured in {graph.precision}; capture it with --precision {precision}")
    files["capture"] = path
    return model, tuple(dict.fromkeys([*graph.notes, *model.notes]))


def _cluster(file: TomlFile, name: str, files: dict[str, Path]) -> Cluster:
    text, path = file_beside(name, file.path.parent)
    try:
        cluster = parse_cluster(text)
    except InputError as error:
        file.fail("cluster", str(error))
    if path is not None and path.is_file():
        files["cluster_file"] = path
    return cluster


_NOT_USED = frozenset(
    (
        *(f"device.{key}" for key in ("l2_cache", "vector_memory", "clock", "launch", "samples")),
        "cpu_cores",
        *(f"{level}.latency" for level in (*INSIDE, "nic")),
        *(f"{level}.duplex" for level in BETWEEN),
    )
)
"""Keys of a cluster file that decide predictions of recorded jobs only, or none: NCCL's steps have latencies of their own."""


def _about_cluster(cluster: Cluster, path: Path | None) -> tuple[str, ...]:
    """Sentences on a cluster of GPUs: on a power limit below the rated one, and on keys of its file that decide nothing here."""
    device, sentences = cluster.groups[0].host.device, list[str]()
    if device.kind != "gpu":
        return ()
    likely, least = capped_clock(device)
    if likely < 1:
        said = f"at {device.power_w:g} W, below its rated power, {device.name} is taken to compute at {likely:.0%} of its clock"
        sentences.append(f"{said} (the cube root of the power); the interval reaches to {least:.0%}")
    unused = sorted(_unused_keys(TomlFile(path).values())) if path is not None else []
    if unused:
        sentences.append(f"{path}: {', '.join(unused)}: not used by predictions of described jobs")
    return tuple(sentences)


def _unused_keys(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and key != "source":
            yield from _unused_keys(value, f"{table}{key}.")
        elif f"{table}{key}" in _NOT_USED:
            yield f"{table}{key}"


def _provenance(job_file: JobToml, fixed: Fixed, cluster: Cluster, strategy: Strategy) -> tuple[tuple[str, str], ...]:
    degrees = ", ".join(
        f"{name} {getattr(strategy, name)}" for name in ("tp", "pp", "cp", "dp", "ep") if getattr(strategy, name) > 1
    )
    what = f"sequences of {fixed.sequence} tokens" if fixed.has_tokens else "samples"
    state_bytes = job_file.optimizer_bytes(FRAMEWORKS[job_file.framework].runtime)
    states = "" if state_bytes is None else f" of {state_bytes:g} bytes a parameter"
    trained = f", adapters of {job_file.frozen_weights or 'unquantized'} weights" if job_file.trains_adapters else ""
    return (
        ("model", fixed.model.name),
        ("batch", f"{fixed.global_batch} {what}, {job_file.precision}, {job_file.optimizer}{states}{trained}"),
        ("cluster", cluster.name),
        ("devices", f"{fixed.devices} of {cluster.describe()}"),
        ("strategy", degrees or "one device"),
    )
