"""Applies a mesh to a model as a script for real devices would: DistributedDataParallel, `fully_shard`, `parallelize_module`."""

import dpro_search_capture_torch as private
import torch
from torch import nn

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")  # from the outside in, as torchtitan numbers ranks

# Last parts of the names of linear layers whose columns, or whose rows, tensor parallel ranks split: Llama's and its relatives',
# GPT-2's (nn.Linear), BERT's, T5's.
COLUMNS = {
    *("wq", "wk", "wv", "w1", "w3", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc", "query", "key", "value"),
    *("to_q", "to_k", "to_v", "wi", "wi_0", "wi_1", "lin1", "linear1", "q_lin", "k_lin", "v_lin", "dense_h_to_4h", "up", "gate"),
}
ROWS = {
    *("wo", "w2", "o_proj", "out_proj", "down_proj", "fc2", "c_proj", "to_out", "lin2", "linear2", "out_lin", "dense_4h_to_h"),
    *("down", "attn_out"),
}


def units_of(model):
    """(name, module) of the parts that repeat: members, with parts of their own, of the outermost lists of modules."""
    found = []

    def visit(name, module):
        children = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
        parts = [(key, child) for key, child in children if any(True for _ in child.children())]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(parts) > 1:
            found.extend(("%s.%s" % (name, key) if name else key, child) for key, child in parts)
            return
        for key, child in children:
            visit("%s.%s" % (name, key) if name else key, child)

    visit("", model)
    return found


def layouts_of(model, plan):
    """ "columns" or "rows" by the name of a linear layer: from a plan for `parallelize_module`, else from usual names."""
    if plan is not None:
        kinds = {"ColwiseParallel": "columns", "RowwiseParallel": "rows"}
        found = {name: kinds.get(type(style).__name__) for name, style in _expanded(model, plan).items()}
        return {name: kind for name, kind in found.items() if kind}
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and "." in name:
            if last in COLUMNS:
                found[name] = "columns"
            elif last in ROWS:
                found[name] = "rows"
    pairs = {name.rpartition(".")[0] for name, kind in found.items() if kind == "columns"} & {
        name.rpartition(".")[0] for name, kind in found.items() if kind == "rows"
    }
    return {name: kind for name, kind in found.items() if name.rpartition(".")[0] in pairs}


def _expanded(model, plan):
    """A plan with the names that its patterns match."""
    import fnmatch

    names = [name for name, _ in model.named_modules()]
    return {name: style for pattern, style in plan.items() for name in names if fnmatch.fnmatchcase(name, pattern)}


def usual_plan(layouts):
    """For `parallelize_module`: the residual stream is whole on every rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {name: ColwiseParallel() if kind == "columns" else RowwiseParallel() for name, kind in layouts.items()}


def parallelized(model, mesh, plan, precision, bucket_mib):
    """The model as ranks of the mesh hold it; the second value says which gradients DistributedDataParallel sums."""
    names = mesh.mesh_dim_names
    if "tp" in names:
        from torch.distributed.tensor.parallel import parallelize_module

        if not plan:
            raise ValueError("no linear layers of known names are split over tp: give a function with --tp-plan")
        parallelize_module(model, mesh["tp"], plan)
    if "dp_shard" in names:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        own = ("dp_replicate", "dp_shard") if "dp_replicate" in names else ("dp_shard",)
        policy = MixedPrecisionPolicy()
        if precision != "fp32":
            policy = MixedPrecisionPolicy(param_dtype=dtype_of(precision), reduce_dtype=torch.float32)
        for _, unit in units_of(model):
            fully_shard(unit, mesh=mesh[own], mp_policy=policy)
        fully_shard(model, mesh=mesh[own], mp_policy=policy)
    return model


def dtype_of(precision):
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


class GradientBuckets:
    """The sums of DistributedDataParallel, whose reducer needs tensors with data: gradients in the order in which they are ready.

    That is the order of its buckets from the second step on.
    """

    def __init__(self, model, ranks, bucket_mib, recorder):
        self._ranks, self._recorder, self._cap = ranks, recorder, int(bucket_mib * 2**20)
        self._order, self._left = [], {}
        self._buckets = None
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter):
        if self._buckets is None:
            self._order.append(parameter)
            return
        bucket = self._buckets[id(parameter)]
        self._left[bucket] -= 1
        if not self._left[bucket]:
            members = [each for each in self._order if self._buckets[id(each)] == bucket]
            self._recorder.collective("all_reduce", sum(each.numel() for each in members), members[0], self._ranks)

    def step_ended(self):
        """Buckets of the order that was seen, for the next step."""
        if self._buckets is None:
            found = private.bucket_assignment(self._order, self._cap, min(self._cap, 2**20))
            self._buckets = {id(self._order[index]): number for number, bucket in enumerate(found) for index in bucket}
        self._left = {}
        for bucket in self._buckets.values():
            self._left[bucket] = self._left.get(bucket, 0) + 1
