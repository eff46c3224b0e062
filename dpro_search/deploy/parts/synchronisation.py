"""Target ``synchronisation``: a PyTorch job whose workers commit by a scheme, with `dpro_search.deploy.synchronisation`."""

from __future__ import annotations

from dpro_search.deploy.parts.part import FOLDER, JobFacts, Part, Target, as_json
from dpro_search.space.plan import Plan
from dpro_search.space.synchronisation import parse_scheme


def synchronisation_part(plan: Plan, facts: JobFacts) -> Part:
    """The scheme in a file, and the two lines that read it."""
    if plan.synchronisation is None:
        return Part()
    setup = (
        ("Start Ray (`ray start --head`) before the job; all workers find it by `RAY_ADDRESS`.",)
        if not parse_scheme(plan.synchronisation).collective
        else ()
    )
    return Part(
        env={"DPRO_SEARCH_SYNCHRONISATION": f"{FOLDER}/synchronisation.json"},
        files={"synchronisation.json": as_json({"version": 1, "synchronisation": plan.synchronisation})},
        script=(
            "`from dpro_search.deploy.synchronisation import synchronise`, and `sync = synchronise(model, optimizer)` after both "
            "are made, in place of `DistributedDataParallel(model)`.",
            "`sync.step(loss)` in place of `optimizer.step()`.",
        ),
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
