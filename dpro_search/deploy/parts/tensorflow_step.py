"""A step of TensorFlow: clusters of XLA, ops in bfloat16, ops computed again, parts of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from dpro_search.deploy.parts.part import JobFacts, Part, Target, as_json, helper_file, micro_batch_files
from dpro_search.errors import InputError
from dpro_search.runtime.follow.graph_rewrites import computed_again
from dpro_search.runtime.follow.xla import PLAN_FILE, cluster_problem, places
from dpro_search.space.plan import Plan

_STEP = ("`from xla import planned_step`, and `train_step = planned_step(train_step)` behind the step's `@tf.function`.",)


def xla_part(plan: Plan, facts: JobFacts) -> Part:
    """Clusters for XLA."""
    clusters = plan.op_clusters or ()
    if facts.op_inputs:
        problem = cluster_problem(_cluster_of(plan), facts.op_inputs)
        if problem:
            raise InputError(f"op_clusters: {problem}")
    content = {"clusters": [_with_types(cluster, facts) for cluster in clusters]}
    # Else a cluster that cannot be compiled would run unfused without a word.
    return Part(env={"TF_XLA_FLAGS": "--tf_xla_enable_lazy_compilation=false"}, step=content, script=_STEP)


def tensorflow_part(plan: Plan, facts: JobFacts) -> Part:
    """Ops in bfloat16 or computed again, and parts of a batch."""
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
        files = micro_batch_files(plan.micro_batches)
        script.append(
            "`from micro_batches import planned_gradients`, and `loss, gradients = planned_gradients(compute, inputs, labels)`, "
            "where `compute(inputs, labels)` returns the loss and its gradients before they are averaged over the ranks."
        )
    return Part(files=files, step=step, script=tuple(script))


def step_files(content: Mapping[str, object]) -> dict[str, bytes]:
    """The files that rewrite the graph of a TensorFlow step, with all that is to be done to it."""
    helpers = {name: helper_file(name) for name in ("xla.py", "graph_rewrites.py")}
    return {PLAN_FILE: as_json({"version": 1, **content}), **helpers}


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


XLA = Target(name="xla", fields=("op_clusters",), part=xla_part, framework="tensorflow")
TENSORFLOW = Target(
    name="tensorflow", fields=("bfloat16_ops", "recomputed_ops", "micro_batches"), part=tensorflow_part, framework="tensorflow"
)
