"""Target ``synchronisation``: a job whose workers commit by a scheme, with `dpro_search.runtime.synchronisation`."""

from __future__ import annotations

from dpro_search.deploy.parts.part import FOLDER, JobFacts, Part, Target, as_json
from dpro_search.errors import InputError
from dpro_search.runtime.schemes import parse_scheme
from dpro_search.space.plan import Plan


def synchronisation_part(plan: Plan, facts: JobFacts) -> Part:
    """The scheme in a file, and the two lines of a PyTorch script that read it."""
    if plan.synchronisation is None:
        return Part()
    ray = "Start Ray (`ray start --head`) before the job; all workers find it by `RAY_ADDRESS`."
    return _part(
        plan.synchronisation,
        made="`sync = synchronise(model, optimizer)` after both are made, in place of `DistributedDataParallel(model)`.",
        step="`sync.step(loss)` in place of `optimizer.step()`.",
        setup=() if parse_scheme(plan.synchronisation).collective else (ray,),
    )


def mxnet_synchronisation_part(plan: Plan, facts: JobFacts) -> Part:
    """The same of an MXNet script."""
    if plan.synchronisation is None:
        return Part()
    if parse_scheme(plan.synchronisation).collective:
        raise InputError(f"synchronisation: {plan.synchronisation} uses all-reduces, which MXNet's KVStore has not")
    return _part(
        plan.synchronisation,
        made="`sync = synchronise(net, trainer)` after both are made; the trainer has `kvstore=None`.",
        step="`sync.step(loss)` in place of `trainer.step(batch_size)`.",
        setup=("dpro-search must be importable where the servers run too (PYTHONPATH).",),
    )


def _part(scheme: str, *, made: str, step: str, setup: tuple[str, ...]) -> Part:
    return Part(
        env={"DPRO_SEARCH_SYNCHRONISATION": f"{FOLDER}/synchronisation.json"},
        files={"synchronisation.json": as_json({"version": 1, "synchronisation": scheme})},
        script=(f"`from dpro_search.runtime.synchronisation import synchronise`, and {made}", step),
        setup=setup,
    )


SYNCHRONISATION = Target(
    name="synchronisation",
    fields=("synchronisation",),
    part=synchronisation_part,
    framework="pytorch",
    communicates=True,
    start="torchrun --max-restarts=0 --nproc-per-node N train.py",
)
MXNET_SYNCHRONISATION = Target(
    name="synchronisation",
    fields=("synchronisation",),
    part=mxnet_synchronisation_part,
    framework="mxnet",
    communicates=True,
)
