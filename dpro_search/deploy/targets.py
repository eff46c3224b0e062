"""What each system that can follow a plan takes of it: `parts_of` gives variables, files and lines of the script, or why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace

import msgspec

from dpro_search.collect.launch.hierarchy import among_hosts, hierarchy_env, hierarchy_rules
from dpro_search.collect.launch.parameter_servers import SERVER_HOSTS
from dpro_search.collect.modules import ModuleInfo
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.costmodel.collectives import HIERARCHY, MpiAlgorithm
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.deploy.graph_rewrites import computed_again
from dpro_search.deploy.xla import PLAN_FILE, cluster_problem, places
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from dpro_search.space.transformations.module_precision import refusal as precision_refusal
from dpro_search.space.transformations.modules import refusal

GROUPS_VERSION = 1
FOLDER = "{folder}"
_RULES, _HIERARCHY_RULES = "allreduce.rules", "hierarchy.rules"
_TUNED = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": f"{FOLDER}/{_RULES}",
}
_TUNED_ALLREDUCE = 2  # its number among Open MPI's collectives
_TUNED_ALGORITHMS: Mapping[MpiAlgorithm, int] = {
    "nonoverlapping": 2,
    "recursive-doubling": 3,
    "ring": 4,
    "segmented-ring": 5,
    "rabenseifner": 6,
}
Ranges = Sequence[tuple[int, MpiAlgorithm]]  # from how many bytes
# PyTorch's DDP makes its buckets anew after the first step, and PowerSGD keeps what is left over by bucket. The epsilon keeps a
# gradient that is 0 from becoming NaN.
_POWERSGD_OPTIONS = {"start_powerSGD_iter": 2, "orthogonalization_epsilon": 1e-8}
_DEFAULT_THRESHOLD_BYTES = 128 * 2**20  # Horovod's own
_MIB = 2**20


class Target(StrEnum):
    """Systems that follow a plan, or a part of it."""

    HOROVOD = "horovod"
    XLA = "xla"
    TENSORFLOW = "tensorflow"
    DDP = "ddp"
    PYTORCH = "pytorch"
    MXNET = "mxnet"
    BYTEPS = "byteps"


FIELDS: Mapping[Target, tuple[str, ...]] = {
    Target.HOROVOD: ("fusion_threshold_bytes", "cycle_time_us", "tensor_groups", "allreduce_algorithms", "compression"),
    Target.XLA: ("op_clusters",),
    Target.TENSORFLOW: ("bfloat16_ops", "recomputed_ops", "micro_batches"),
    Target.DDP: ("bucket_cap_bytes", "tensor_groups", "compression"),
    Target.PYTORCH: ("recomputed_modules", "bfloat16_modules", "micro_batches"),
    Target.MXNET: ("servers", "servers_on_workers", "bigarray_bound", "p3", "slice_threshold", "compression"),
    Target.BYTEPS: ("servers", "servers_on_workers", "partition_bytes", "credit", "compression"),
}
_COMMUNICATE = (Target.HOROVOD, Target.DDP, Target.MXNET, Target.BYTEPS)  # a job has one of these
_FRAMEWORK = {  # Horovod has several
    Target.XLA: "tensorflow",
    Target.TENSORFLOW: "tensorflow",
    Target.DDP: "pytorch",
    Target.PYTORCH: "pytorch",
    Target.MXNET: "mxnet",
    Target.BYTEPS: "mxnet",
}
_WHY_NOT = {
    (Target.PYTORCH, "bfloat16_ops"): "autocast takes modules (bfloat16_modules), and the plan names single ops",
    (Target.PYTORCH, "recomputed_ops"): "checkpointing takes modules (recomputed_modules), and the plan names single ops",
    (Target.PYTORCH, "op_clusters"): "torch.compile chooses what it fuses by itself",
    (Target.MXNET, "micro_batches"): "MXNet's Trainer has no line that accumulates without a change of the gradients' grad_req",
}


@dataclass(frozen=True)
class Servers:
    """Recorded parameter servers: how many (0: none, or not known), and whether they were on the workers' hosts."""

    count: int = 0
    on_workers: bool = False


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What is known of the job that will follow a plan.

    Attributes
    ----------
    framework
        "tensorflow", "pytorch" or "mxnet"; None: not known.
    tensors
        The gradients in the order in which they become ready; empty: not known.
    ready_order
        Whether that is the order of `tensors`.
    op_types, op_inputs
        Of every op of rank 0's graph: its type, and the ops that it needs; empty: not known.
    modules
        The model's modules that a plan can name; empty: not known.
    servers
        Recorded parameter servers.
    on_mpi
        Whether Horovod communicates by MPI; None: not known.
    ranks, ranks_per_host
        How many there are, and side by side on each host; None: not known, or hosts differ.
    """

    framework: str | None = None
    tensors: Sequence[TensorInfo] = ()
    ready_order: bool = False
    op_types: Mapping[str, str] = field(default_factory=dict)
    op_inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    modules: Sequence[ModuleInfo] = ()
    servers: Servers = field(default_factory=Servers)
    on_mpi: bool | None = None
    ranks: int | None = None
    ranks_per_host: int | None = None

    @staticmethod
    def of(trace: Trace) -> JobFacts:
        """What a recording knows."""
        types: dict[str, str] = {}
        inputs: dict[str, list[str]] = {}
        if trace.graphs:
            graph = trace.graphs[trace.graph_of_rank[0]]
            for i, (name, kind) in enumerate(zip(graph.name, graph.op, strict=True)):
                types[name] = kind
                inputs[name] = [graph.name[k] for k in graph.input_idx[graph.input_ptr[i] : graph.input_ptr[i + 1]]]
        controller = trace.meta.knobs.get("HOROVOD_CONTROLLER")
        return JobFacts(
            framework=trace.meta.framework,
            tensors=trace.tensors,
            op_types=types,
            op_inputs=inputs,
            modules=trace.modules,
            on_mpi=None if controller is None else controller == "mpi",
            ranks=trace.meta.ranks,
            ranks_per_host=trace.meta.ranks_per_host,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one target needs to follow a plan.

    Attributes
    ----------
    env
        Variables of every process of the job; `FOLDER` in a value stands for the path of the folder that is written.
    files
        Content by name.
    step
        What `xla.py` does to the graph of a TensorFlow step.
    script
        What changes in the training script, in words, a sentence each; empty: nothing.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    step: Mapping[str, object] = field(default_factory=dict)
    script: tuple[str, ...] = ()


def targets_for(plan: Plan, available: Sequence[Target] | None = None) -> tuple[Target, ...]:
    """The targets that together follow a plan, out of those that the job has (None: not known, any; where several can, Horovod).

    Raises
    ------
    InputError
        A field of the plan is nobody's, or several could be meant.
    """
    known = available is not None
    available = tuple(Target) if available is None else available
    fields = set_fields(plan)
    able = {name: [target for target in available if name in FIELDS[target]] for name in fields}
    chosen = {targets[0] for targets in able.values() if len(targets) == 1}
    for name, targets in able.items():
        if not targets:
            raise InputError(f"{name}: {_reason(name, available)}")
        frameworks = {_FRAMEWORK[target] for target in chosen if target in _FRAMEWORK}
        fitting = [target for target in targets if _FRAMEWORK.get(target) in frameworks]
        if not chosen & set(targets) and len(fitting) == 1:
            chosen.add(fitting[0])
        if not chosen & set(targets) and not known and Target.HOROVOD in targets:
            chosen.add(Target.HOROVOD)
        if not chosen & set(targets):
            raise InputError(f"{name}: say which of {', '.join(targets)} is meant with --target")
    if not chosen and known:
        chosen = set(available[:1])  # the empty plan
    return tuple(target for target in Target if target in chosen)


def set_fields(plan: Plan) -> list[str]:
    """Names of the fields that a plan changes."""
    return [name for name in plan.__struct_fields__ if getattr(plan, name) is not None]


def more_servers(plan: Plan, recorded: Servers) -> int:
    """Parameter servers of a plan that need hosts of their own beyond the recorded ones; 0 where no servers were recorded."""
    on_workers = recorded.on_workers if plan.servers_on_workers is None else plan.servers_on_workers
    if not recorded.count or on_workers:
        return 0
    count = recorded.count if plan.servers is None else plan.servers
    return max(count - (0 if recorded.on_workers else recorded.count), 0)


def parts_of(plan: Plan, targets: Sequence[Target], facts: JobFacts | None = None) -> dict[Target, Part]:
    """What each target needs.

    Raises
    ------
    InputError
        A field that none of the targets can express, or not in this job; or targets that no job has together.
    """
    facts = facts or JobFacts()
    several = [target for target in targets if target in _COMMUNICATE]
    if len(several) > 1:
        raise InputError(f"--target {several[0]} and {several[1]}: a job communicates with one of them; leave out the others")
    of_framework = {_FRAMEWORK[target]: target for target in targets if target in _FRAMEWORK}
    if len(of_framework) > 1:
        one, other = list(of_framework.values())[:2]
        raise InputError(f"--target {one} and {other}: a job has one framework; leave out one of them")
    for name in set_fields(plan):
        if not any(name in FIELDS[target] for target in targets):
            raise InputError(f"{name}: {_reason(name, targets)}")
    return {target: _PARTS[target](plan, facts) for target in targets}


def horovod_environment(plan: Plan, *, largest_group_bytes: int = 0) -> dict[str, str]:
    """The variables that put a plan into effect; settings that the plan leaves as they were are left out.

    With exact groups the threshold has no say in what is fused, but Horovod splits a group that is larger. So it is then never
    below Horovod's default nor below the largest group; `tape.py` refuses a group that is larger still.
    """
    env = {}
    threshold_bytes = plan.fusion_threshold_bytes
    if plan.tensor_groups is not None:
        threshold_bytes = max(threshold_bytes or 0, largest_group_bytes, _DEFAULT_THRESHOLD_BYTES)
        env["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
    if threshold_bytes is not None:
        env["HOROVOD_FUSION_THRESHOLD"] = str(threshold_bytes)
    if plan.cycle_time_us is not None:
        env["HOROVOD_CYCLE_TIME"] = f"{plan.cycle_time_us / 1000:.6g}"
    return env


def _horovod(plan: Plan, facts: JobFacts) -> Part:
    sizes = {tensor.name: tensor.size_bytes for tensor in facts.tensors}
    largest = max((sum(sizes.get(name, 0) for name in group) for group in plan.tensor_groups or ()), default=0)
    env = horovod_environment(plan, largest_group_bytes=largest)
    if plan.tensor_groups is not None and facts.framework not in (None, "tensorflow"):
        raise InputError(f"tensor_groups: Horovod's trainer of {facts.framework} makes groups by number only (num_groups)")
    files: dict[str, bytes] = {}
    script: list[str] = []
    if plan.allreduce_algorithms is not None:
        if facts.on_mpi is False:
            raise InputError("allreduce_algorithms: the job communicates by Gloo, which has one algorithm; start it on MPI")
        rules = _algorithm_part(plan.allreduce_algorithms, facts)
        env |= rules.env
        files |= rules.files
        script += rules.script
    if plan.compression not in (None, "fp16"):
        raise InputError(f"compression: Horovod has fp16, not {plan.compression}")
    by_tape = plan.tensor_groups is not None or (plan.compression is not None and facts.framework in (None, "tensorflow"))
    if by_tape:
        content = {"version": GROUPS_VERSION, "groups": plan.tensor_groups or (), "compression": plan.compression}
        files |= {"groups.json": _json(content), "tape.py": _helper("tape.py")}
        script.append(_TAPE if plan.micro_batches is None else _AVERAGES)
    elif plan.compression is not None:
        files |= _trainer_files({"compression": plan.compression})
        script.append(_TRAINER)
    return Part(env=env, files=files, script=tuple(script))


def _algorithm_part(ranges: Ranges, facts: JobFacts) -> Part:
    """The rules of Open MPI that algorithms of all-reduces are; raises `InputError` where the job has no use for a hierarchy."""
    if all(algorithm != HIERARCHY for _, algorithm in ranges):
        files, env = {_RULES: _rules({1: ranges})}, _TUNED
    else:
        if facts.ranks is None or facts.ranks_per_host is None:
            raise InputError("allreduce_algorithms: a hierarchy needs a recording that tells of one number of ranks on every host")
        if facts.ranks_per_host == 1:
            raise InputError(
                "allreduce_algorithms: a hierarchy needs several ranks on a host, on each of several hosts; here it has one"
            )
        hosts = facts.ranks // facts.ranks_per_host
        by_ranks: dict[int, Ranges] = {hosts: ((0, among_hosts(hosts)),)}
        if flat := [(start, algorithm) for start, algorithm in ranges if algorithm != HIERARCHY]:
            by_ranks[facts.ranks] = ((0, flat[0][1]), *flat[1:])
        in_hierarchy = hierarchy_rules([(start, algorithm == HIERARCHY) for start, algorithm in ranges])
        files = {_RULES: _rules(by_ranks), _HIERARCHY_RULES: in_hierarchy}
        env = {**_TUNED, **hierarchy_env(f"{FOLDER}/{_HIERARCHY_RULES}")}
    named = " and ".join(f"`{name}`" for name in files)
    script = f"Horovod must communicate by Open MPI, and {named} lie at the same path on all hosts."
    return Part(env=env, files=files, script=(script,))


def _rules(by_ranks: Mapping[int, Ranges]) -> bytes:
    """Open MPI's file of rules (coll/tuned, as 4.x reads it): a line for each range, where that many ranks or more add up."""
    lines = ["1  # collective", f"{_TUNED_ALLREDUCE}  # all-reduce", f"{len(by_ranks)}  # number of ranks"]
    for ranks, ranges in by_ranks.items():
        lines += [
            f"{ranks}  # or more",
            f"{len(ranges)}  # ranges: from how many bytes, algorithm, fan-out and segment of its choice",
            *(f"{start} {_TUNED_ALGORITHMS[algorithm]} 0 0" for start, algorithm in ranges),
        ]
    return "".join(f"{line}\n" for line in lines).encode()


def _xla(plan: Plan, facts: JobFacts) -> Part:
    clusters = plan.op_clusters or ()
    if facts.op_inputs:
        problem = cluster_problem(_cluster_of(plan), facts.op_inputs)
        if problem:
            raise InputError(f"op_clusters: {problem}")
    content = {"clusters": [_with_types(cluster, facts) for cluster in clusters]}
    # Else a cluster that cannot be compiled would run unfused without a word.
    return Part(env={"TF_XLA_FLAGS": "--tf_xla_enable_lazy_compilation=false"}, step=content, script=_STEP)


def _tensorflow(plan: Plan, facts: JobFacts) -> Part:
    files: dict[str, bytes] = {}
    step: dict[str, object] = {}
    script: list[str] = []
    if plan.bfloat16_ops is not None or plan.recomputed_ops is not None:
        chosen = {"bfloat16": plan.bfloat16_ops or (), "recomputed": plan.recomputed_ops or ()}
        missing = [name for names in chosen.values() for name in names if facts.op_types and name not in facts.op_types]
        if missing:
            raise InputError(f"the recorded step has no op '{missing[0]}', which the plan computes in another way")
        _require_recomputation(plan, facts)
        step = {kind: _with_types(names, facts) for kind, names in chosen.items()}
        script = [*_STEP]
    if plan.micro_batches is not None:
        files = _micro_batch_files(plan.micro_batches)
        script.append(
            "`from micro_batches import planned_gradients`, and `loss, gradients = planned_gradients(compute, inputs, labels)`, "
            "where `compute(inputs, labels)` returns the loss and its gradients before they are averaged over the ranks."
        )
    return Part(files=files, step=step, script=tuple(script))


def _require_recomputation(plan: Plan, facts: JobFacts) -> None:
    """Raise `InputError` if the backward pass needs none of the recomputed ops again, where the recording tells."""
    if not plan.recomputed_ops or not facts.op_inputs:
        return
    nodes = [SimpleNamespace(name=name, op=facts.op_types[name], input=needed) for name, needed in facts.op_inputs.items()]
    place = places(_cluster_of(plan), facts.op_inputs)
    if not computed_again(SimpleNamespace(node=nodes), plan.recomputed_ops, place):
        raise InputError(
            f"recomputed_ops: the backward pass uses '{plan.recomputed_ops[0]}' and all others at once, so that none would be "
            "computed again; leave the field out"
        )


def _cluster_of(plan: Plan) -> dict[str, int]:
    return {name: number for number, cluster in enumerate(plan.op_clusters or ()) for name in cluster}


def _with_types(names: Sequence[str], facts: JobFacts) -> list[tuple[str, str | None]]:
    """Ops with their recorded types, where these are known: some stand for several ops of the step as written."""
    return [(name, facts.op_types.get(name)) for name in names]


def _ddp(plan: Plan, facts: JobFacts) -> Part:
    options: dict[str, object] = {}
    if plan.tensor_groups is not None and plan.bucket_cap_bytes is not None:
        raise InputError("tensor_groups and bucket_cap_bytes: a bucket's size follows from its group; leave out one of them")
    if plan.bucket_cap_bytes is not None:
        options["bucket_cap_mb"] = plan.bucket_cap_bytes / _MIB
    if plan.tensor_groups is not None:
        options["bucket_cap_mb_list"] = [size / _MIB for size in _bucket_sizes(plan.tensor_groups, facts)]
    if plan.compression not in (None, "fp16", *POWERSGD):
        raise InputError(f"compression: DDP has fp16 and {', '.join(POWERSGD)}, not {plan.compression}")
    content: dict[str, object] = {"version": 1, "options": options, "compression": plan.compression}
    script: tuple[str, ...] = (
        "`from ddp import planned_ddp`, and `model = planned_ddp(model)` in place of `DistributedDataParallel(model)`; it takes "
        "the same arguments.",
    )
    if plan.compression in POWERSGD:
        content["powersgd"] = {**_POWERSGD_OPTIONS, "matrix_approximation_rank": POWERSGD[plan.compression]}
        script += (_POWERSGD_START,)
    return Part(files={"ddp.json": _json(content), "ddp.py": _helper("ddp.py")}, script=script)


def _bucket_sizes(groups: Sequence[Sequence[str]], facts: JobFacts) -> list[int]:
    """Limits under which DDP makes exactly these buckets: it closes one with the gradient that brings it to its limit.

    Raises `InputError` for groups that are not runs of the order in which gradients become ready.
    """
    if not facts.ready_order:
        raise InputError(
            "tensor_groups: DDP's buckets are cut by size, which needs the recording: export from the folder of the search"
        )
    sizes = {tensor.name: tensor.size_bytes for tensor in facts.tensors}
    names = [name for group in groups for name in group]
    if names != list(sizes):
        raise InputError(
            "tensor_groups: DDP's buckets hold every gradient, and are cut from the order in which these become ready; "
            "the plan's groups are not such runs"
        )
    return [sum(sizes[name] for name in group) for group in groups]


def _pytorch(plan: Plan, facts: JobFacts) -> Part:
    files: dict[str, bytes] = {}
    script: list[str] = []
    if plan.recomputed_modules is not None or plan.bfloat16_modules is not None:
        again, lowered = plan.recomputed_modules or (), plan.bfloat16_modules or ()
        why = (refusal(facts.modules, again) or precision_refusal(facts.modules, lowered)) if facts.modules else None
        if why is not None:
            raise InputError(why)
        content = {"version": 1, "recomputed": again, "bfloat16": lowered}
        files |= {"modules.json": _json(content), "modules.py": _helper("modules.py")}
        script.append(
            "`from modules import planned_modules`, and `model = planned_modules(model)` before `DistributedDataParallel(model)`."
        )
    if plan.micro_batches is not None:
        files |= _micro_batch_files(plan.micro_batches)
        script.append(
            "`from micro_batches import planned_parts`, and forward and backward pass below "
            "`for inputs, labels in planned_parts(model, inputs, labels):` (the optimizer's step stays behind it)."
        )
    return Part(files=files, script=tuple(script))


def _mxnet(plan: Plan, facts: JobFacts) -> Part:
    env = _numbers(
        {
            "DMLC_NUM_SERVER": plan.servers,
            "MXNET_KVSTORE_BIGARRAY_BOUND": plan.bigarray_bound,
            "MXNET_KVSTORE_SLICE_THRESHOLD": plan.slice_threshold,
        }
    )
    env |= _server_hosts(plan)
    if plan.p3 is not None:  # an empty variable is the ordinary van; P3's servers do not update
        env |= {"DMLC_PS_VAN_TYPE": "p3" if plan.p3 else "zmq", "MXNET_UPDATE_ON_KVSTORE": "0" if plan.p3 else "1"}
    if plan.compression is None:
        return Part(env=env)
    if plan.compression != "2bit":
        raise InputError(f"compression: MXNet's KVStore has 2bit, not {plan.compression}")
    if plan.p3:
        raise InputError("compression and p3: MXNet's KVStore does not compress priority slices")
    return Part(env=env, files=_trainer_files({"compression_params": {"type": "2bit", "threshold": 0.5}}), script=(_TRAINER,))


def _byteps(plan: Plan, facts: JobFacts) -> Part:
    env = _numbers(
        {
            "DMLC_NUM_SERVER": plan.servers,
            "BYTEPS_PARTITION_BYTES": plan.partition_bytes,
            "BYTEPS_SCHEDULING_CREDIT": plan.credit,
        }
    )
    env |= _server_hosts(plan)
    if plan.compression not in (None, "fp16"):
        raise InputError(f"compression: BytePS has fp16, not {plan.compression}")
    if plan.compression is None:
        return Part(env=env)
    return Part(env=env, files=_trainer_files({"compression_params": {"fp16": True}}), script=(_TRAINER,))


def _server_hosts(plan: Plan) -> dict[str, str]:
    """What our own launcher obeys; any other one is told by people."""
    if plan.servers_on_workers is None:
        return {}
    return {SERVER_HOSTS: "workers" if plan.servers_on_workers else "own"}


_PARTS: Mapping[Target, Callable[[Plan, JobFacts], Part]] = {
    Target.HOROVOD: _horovod,
    Target.XLA: _xla,
    Target.TENSORFLOW: _tensorflow,
    Target.DDP: _ddp,
    Target.PYTORCH: _pytorch,
    Target.MXNET: _mxnet,
    Target.BYTEPS: _byteps,
}
_STEP = ("`from xla import planned_step`, and `train_step = planned_step(train_step)` behind the step's `@tf.function`.",)
_TAPE = (
    "`from tape import planned_tape`, and `tape = planned_tape(tape, model.trainable_variables)` in place of "
    "`hvd.DistributedGradientTape(tape)`."
)
_AVERAGES = (
    "`from tape import planned_averages`, and `gradients = planned_averages(gradients, model.trainable_variables)` behind "
    "`planned_gradients`, in place of `hvd.allreduce`."
)
_POWERSGD_START = (
    "PowerSGD begins at step `start_powerSGD_iter` of `ddp.json`, which is 2, the least that PyTorch takes, so that short runs "
    "measure compressed steps: for training raise it to a tenth of all steps, as PyTorch advises, since early gradients suffer "
    "most. What the hook leaves over of gradients is in no checkpoint: a job that starts again begins without it."
)
_TRAINER = "`from trainer import planned_options`, and `**planned_options()` among the arguments of the Trainer."


def _reason(name: str, targets: Sequence[Target]) -> str:
    reasons = [why for (target, field_name), why in _WHY_NOT.items() if field_name == name and target in targets]
    able = [target for target in Target if name in FIELDS[target]]
    told = f"; {reasons[0]}" if reasons else ""
    return f"{' and '.join(targets) or 'this job'} cannot express it{told} (known to: {', '.join(able)}; choose with --target)"


def _numbers(values: Mapping[str, int | None]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def step_files(content: Mapping[str, object]) -> dict[str, bytes]:
    """The files that rewrite the graph of a TensorFlow step, with all that is to be done to it."""
    helpers = {name: _helper(name) for name in ("xla.py", "graph_rewrites.py")}
    return {PLAN_FILE: _json({"version": 1, **content}), **helpers}


def _micro_batch_files(count: int) -> dict[str, bytes]:
    return {"micro_batches.json": _json({"version": 1, "micro_batches": count}), "micro_batches.py": _helper("micro_batches.py")}


def _trainer_files(options: Mapping[str, object]) -> dict[str, bytes]:
    return {"trainer.json": _json({"version": 1, "options": options}), "trainer.py": _helper("trainer.py")}


def _helper(name: str) -> bytes:
    return Path(__file__).with_name(name).read_bytes()


def _json(content: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
