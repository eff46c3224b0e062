"""Horovod: variables, exact groups, algorithms of all-reduces, gradients in half precision."""

from __future__ import annotations

from dpro_search.deploy.parts.open_mpi import algorithm_part
from dpro_search.deploy.parts.part import TRAINER_LINE, JobFacts, Part, Target, as_json, helper_file, trainer_files
from dpro_search.errors import InputError
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
        rules = algorithm_part(algorithms, facts)
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


HOROVOD = Target(
    name="horovod",
    fields=("fusion_threshold_bytes", "cycle_time_us", "tensor_groups", "allreduce_algorithms", "compression"),
    part=horovod_part,
    communicates=True,
    start="horovodrun -np N python train.py",
    always_env=True,
)
