"""Export of a `Plan` to a stock Horovod job: environment variables, exact groups, and the helper that puts them into effect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpro_search.collect._files import written_folder
from dpro_search.space.plan import Plan

GROUPS_VERSION = 1
_TAPE = Path(__file__).with_name("tape.py")
_DEFAULT_THRESHOLD_BYTES = 128 * 2**20  # Horovod's own


@dataclass(frozen=True, kw_only=True)
class ExportedFiles:
    """What was written, and how a job uses it."""

    folder: Path
    files: tuple[str, ...]  # names in `folder`, sorted
    usage: str  # a few lines for people


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


def export_horovod(plan: Plan, out: Path, *, largest_group_bytes: int = 0) -> ExportedFiles:
    """Write the folder `out`, whole or not at all.

    Always ``horovod.env`` (lines KEY=VALUE), ``plan.json`` and ``README.md``; with exact groups also ``groups.json`` and
    ``tape.py``, which the job imports.

    Parameters
    ----------
    largest_group_bytes
        Gradients of the plan's largest group, where known; only needed above 128 MiB.

    Raises
    ------
    InputError
        `out` exists.
    MissingCapabilityError
        The disk cannot take it.
    """
    env = horovod_environment(plan, largest_group_bytes=largest_group_bytes)
    contents = {
        "horovod.env": "".join(f"{key}={value}\n" for key, value in env.items()).encode(),
        "plan.json": plan.to_json(),
        "README.md": _readme(plan).encode(),
    }
    if plan.tensor_groups is not None:
        groups = msgspec.json.encode({"version": GROUPS_VERSION, "groups": plan.tensor_groups})
        contents["groups.json"] = msgspec.json.format(groups, indent=1) + b"\n"
        contents["tape.py"] = _TAPE.read_bytes()
    with written_folder(out) as folder:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    return ExportedFiles(folder=out, files=tuple(sorted(contents)), usage=_usage(plan, out))


def _usage(plan: Plan, out: Path) -> str:
    lines = [f"env $(cat {out}/horovod.env) horovodrun -np N python train.py"]
    if plan.tensor_groups is not None:
        lines += [
            f"with {out} on PYTHONPATH, in train.py: from tape import planned_tape",
            "and in place of hvd.DistributedGradientTape(tape): planned_tape(tape, model.trainable_variables)",
        ]
    return "\n".join(lines)


def _readme(plan: Plan) -> str:
    if plan.tensor_groups is None:
        script = ["2. The training script stays as it is."]
    else:
        script = [
            "2. Put this folder on PYTHONPATH, and `from tape import planned_tape` in the training script.",
            "3. `tape = planned_tape(tape, model.trainable_variables)` in place of `hvd.DistributedGradientTape(tape)`.",
        ]
    lines = [
        "# A plan for Horovod, exported by dpro-search",
        "1. Set the variables of `horovod.env` on every rank: `env $(cat horovod.env) horovodrun -np N python train.py`.",
        *script,
        "",
        "`plan.json` is the plan itself: `dpro-search replay --plan plan.json` predicts it.",
    ]
    return "\n".join(lines) + "\n"
