"""Horovod: variables, exact groups, algorithms of all-reduces, gradients in half precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpro_search.collect.launch.mpi import among_hosts, hierarchy_env, hierarchy_rules
from dpro_search.costmodel.collectives.counts import HIERARCHY, MpiAlgorithm
from dpro_search.deploy.parts.part import FOLDER, TRAINER_LINE, JobFacts, Part, Target, as_json, helper_file, trainer_files
from dpro_search.errors import InputError
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.library import OPEN_MPI, OPEN_MPI_OBEYS
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import HorovodSettings

_GROUPS_VERSION = 1
_DEFAULT_THRESHOLD_BYTES = 128 * 2**20  # Horovod's own
_TAPE = (
    "`from tape import planned_tape`, and `tape = planned_tape(tape, model.trainable_variables)` in place of "
    "`hvd.DistributedGradientTape(tape)`."
)
_KERAS = (
    "With Keras `fit` it is `from tape import planned_groups` instead, and `groups=planned_groups(model.trainable_variables)` "
    "among the arguments of `hvd.DistributedOptimizer`."
)
_AVERAGES = (
    "`from tape import planned_averages`, and `gradients = planned_averages(gradients, model.trainable_variables)` behind "
    "`planned_gradients`, in place of `hvd.allreduce`."
)

Ranges = Sequence[tuple[int, MpiAlgorithm]]  # from how many bytes

_RULES, _HIERARCHY_RULES = "allreduce.rules", "hierarchy.rules"
_TUNED = {
    OPEN_MPI_OBEYS: "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": f"{FOLDER}/{_RULES}",
}
_TUNED_ALLREDUCE = 2  # its number among Open MPI's collectives


def horovod_environment(plan: Plan, *, largest_group_bytes: int = 0) -> dict[str, str]:
    """The environment variables of a plan, for the fields that it sets.

    With exact groups the threshold does not decide what is fused, but Horovod splits a group that is larger. So it is at least
    Horovod's default and the largest group; `tape.py` refuses a larger group.
    """
    env, settings = {}, HorovodSettings.of(plan)
    threshold_bytes = settings.fusion_threshold_bytes
    if plan.tensor_groups is not None:
        threshold_bytes = max(threshold_bytes or 0, largest_group_bytes, _DEFAULT_THRESHOLD_BYTES)
        env["HOROVOD_DISABLE_GROUP_FUSION"] = "1"
    if threshold_bytes is not None:
        env["HOROVOD_FUSION_THRESHOLD"] = str(threshold_bytes)
    if settings.cycle_time_us is not None:
        env["HOROVOD_CYCLE_TIME"] = f"{settings.cycle_time_us / 1000:.6g}"
    return env


def horovod_part(plan: Plan, facts: JobFacts) -> Part:
    """Fusion, cycles, groups, algorithms and compression of Horovod."""
    sizes = {tensor.name: tensor.size_bytes for tensor in facts.tensors}
    largest = max((sum(sizes.get(name, 0) for name in group) for group in plan.tensor_groups or ()), default=0)
    env = horovod_environment(plan, largest_group_bytes=largest)
    if plan.tensor_groups is not None and facts.framework not in (None, "tensorflow"):
        raise InputError(f"tensor_groups: Horovod's trainer of {facts.framework} makes groups by number only (num_groups)")
    files: dict[str, bytes] = {}
    script: list[str] = []
    setup: tuple[str, ...] = ()
    algorithms = HorovodSettings.of(plan).allreduce_algorithms
    if algorithms is not None:
        if facts.on_mpi is False:
            raise InputError("allreduce_algorithms: the job communicates by Gloo, which has one algorithm; start it on MPI")
        rules = _algorithm_part(algorithms, facts)
        env |= rules.env
        files |= rules.files
        setup = rules.setup
    if plan.compression not in (None, "fp16"):
        raise InputError(f"compression: Horovod has fp16, not {plan.compression}")
    by_tape = plan.tensor_groups is not None or (plan.compression is not None and facts.framework in (None, "tensorflow"))
    if by_tape:
        content = {"version": _GROUPS_VERSION, "groups": plan.tensor_groups or (), "compression": plan.compression}
        files |= {"groups.json": as_json(content), "tape.py": helper_file("tape.py")}
        script.append(_TAPE if plan.micro_batches is None else _AVERAGES)
        if plan.micro_batches is None and plan.compression is None:
            script.append(_KERAS)
    elif plan.compression is not None:
        files |= trainer_files({"compression": plan.compression})
        script.append(TRAINER_LINE)
    return Part(env=env, files=files, script=tuple(script), setup=setup)


def _algorithm_part(ranges: Ranges, facts: JobFacts) -> Part:
    """Open MPI's rules for algorithms of all-reduces; raises `InputError` if the job cannot use a hierarchy."""
    if all(algorithm != HIERARCHY for _, algorithm in ranges):
        files, env = {_RULES: _rules({1: ranges})}, _TUNED
    else:
        if facts.ranks is None or facts.ranks_per_host is None:
            raise InputError("allreduce_algorithms: a hierarchy needs a recording with the same number of ranks on every host")
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
    setup = f"Horovod must communicate by Open MPI, and {named} lie at the same path on all hosts."
    return Part(env=env, files=files, setup=(setup,))


def _rules(by_ranks: Mapping[int, Ranges]) -> bytes:
    """Open MPI's file of rules (coll/tuned, as 4.x reads it): a line for each range, for all-reduces of that many ranks or more."""
    lines = ["1  # collective", f"{_TUNED_ALLREDUCE}  # all-reduce", f"{len(by_ranks)}  # number of ranks"]
    for ranks, ranges in by_ranks.items():
        lines += [
            f"{ranks}  # or more",
            f"{len(ranges)}  # ranges: from how many bytes, algorithm, fan-out and segment of its choice",
            *(f"{start} {OPEN_MPI[algorithm]} 0 0" for start, algorithm in ranges),
        ]
    return "".join(f"{line}\n" for line in lines).encode()


HOROVOD = Target(
    name="horovod",
    fields=("fusion_threshold_bytes", "cycle_time_us", "tensor_groups", "allreduce_algorithms", "compression"),
    part=horovod_part,
    communicates=True,
    start="horovodrun -np N python train.py",
    always_env=True,
)
