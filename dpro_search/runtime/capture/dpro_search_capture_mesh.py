"""Applies a mesh to a model as a script for real devices would: DistributedDataParallel, `fully_shard`, `parallelize_module`,
`context_parallel`, all-to-alls of experts. `dpro_search_capture_pipeline` makes the stages of a pipeline.
"""

import contextlib

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
    units = []

    def visit(name, module):
        children = [(key, child) for key, child in module.named_children() if any(True for _ in child.parameters())]
        parts = [(key, child) for key, child in children if any(True for _ in child.children())]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(parts) > 1:
            units.extend(("%s.%s" % (name, key) if name else key, child) for key, child in parts)
            return
        for key, child in children:
            visit("%s.%s" % (name, key) if name else key, child)

    visit("", model)
    return units


def layouts_of(model, plan):
    """ "columns" or "rows" by the name of a linear layer: from a plan for `parallelize_module`, else from usual names."""
    if plan is not None:
        kinds = {"ColwiseParallel": "columns", "RowwiseParallel": "rows"}
        layouts = {name: kinds.get(type(style).__name__) for name, style in _expanded(model, plan).items()}
        return {name: kind for name, kind in layouts.items() if kind}
    layouts = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and "." in name:
            if last in COLUMNS:
                layouts[name] = "columns"
            elif last in ROWS:
                layouts[name] = "rows"
    pairs = {name.rpartition(".")[0] for name, kind in layouts.items() if kind == "columns"} & {
        name.rpartition(".")[0] for name, kind in layouts.items() if kind == "rows"
    }
    return {name: kind for name, kind in layouts.items() if name.rpartition(".")[0] in pairs}


def _expanded(model, plan):
    """A plan with the names that its patterns match."""
    import fnmatch

    names = [name for name, _ in model.named_modules()]
    return {name: style for pattern, style in plan.items() for name in names if fnmatch.fnmatchcase(name, pattern)}


def usual_plan(layouts):
    """For `parallelize_module`: the residual stream is whole on every rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {name: ColwiseParallel() if kind == "columns" else RowwiseParallel() for name, kind in layouts.items()}


class Mesh:
    """The ranks of a captured job.

    Ranks of ep are neighbours within dp_shard, or within dp_replicate without a dp_shard; those of cp sum gradients, and
    share parameters, with those of dp. So torchtitan has it.

    Attributes
    ----------
    sizes
        Ranks along each axis.
    """

    def __init__(self, sizes, rank):
        from torch.distributed.device_mesh import init_device_mesh

        self.sizes = sizes
        names = [name for name in AXES if name in sizes and name != "ep"]
        ranks = 1
        for name in names:
            ranks *= sizes[name]
        private.start_fake_group(ranks, rank)
        self._mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
        self.shards = "dp_shard" in sizes
        self._same_experts = self._experts = None
        if "ep" in sizes:
            axis = "dp_shard" if self.shards else "dp_replicate"
            if self.sizes.get(axis, 1) % sizes["ep"]:
                raise ValueError("ep %d: ranks of ep are ranks of dp or dp_shard: give as many, or a multiple" % sizes["ep"])
            self._same_experts, self._experts = private.inner_mesh(self._mesh[axis], axis, sizes["ep"])

    def __contains__(self, axis):
        return axis in self.sizes

    def axis(self, name):
        """A `DeviceMesh` of one axis."""
        return self._experts if name == "ep" else self._mesh[name]

    @property
    def whole(self):
        """The `DeviceMesh` of all axes."""
        return self._mesh

    def of_parameters(self):
        """The mesh of `fully_shard`: axes that share parameters, and before them the axis that copies them."""
        shared = tuple(name for name in ("dp_shard", "cp") if name in self)
        if "dp_replicate" not in self:
            return private.joined_mesh(self._mesh, shared)
        if len(shared) > 1:
            raise ValueError("HSDP with context parallel is not captured: leave dp out, or cp")
        return self._mesh["dp_replicate", "dp_shard"]

    def of_experts(self):
        """The mesh of `fully_shard` for experts' parameters: the ranks with equal experts; one rank where all experts differ."""
        return self._same_experts

    def summing(self, experts=False):
        """Ranks that sum gradients without `fully_shard`; one: none."""
        if experts and self._experts is not None:
            return _ranks(self._same_experts)
        names = tuple(name for name in ("dp_replicate", "cp") if name in self)
        return _ranks(private.joined_mesh(self._mesh, names)) if names else [0]


def _ranks(mesh):
    return torch.distributed.get_process_group_ranks(mesh.get_group())


def experts_of(model):
    """(name, module) of each group of experts: all parameters have a first dim of experts, and a matrix for each."""
    experts = []
    for name, module in model.named_modules():
        direct = list(module.parameters(recurse=False))
        if direct and len(list(module.parameters())) == len(direct) and all(each.dim() >= 3 for each in direct):
            if len({each.shape[0] for each in direct}) == 1 and not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                experts.append((name, module))
    return experts


def split_experts(model, mesh):
    """Each rank has its share of the experts; tokens, which come by expert, go to them and back by all-to-alls.

    A group of experts takes a tensor of experts x tokens of each x width first, and returns one like it.
    """
    groups = experts_of(model)
    if not groups:
        raise ValueError("no module has parameters of experts alone (experts x rows x columns each): give --parallelize")
    ranks = mesh.size()
    for name, module in groups:
        for key, parameter in list(module.named_parameters()):
            if parameter.shape[0] % ranks:
                raise ValueError("%s has %d experts, which %d ranks of ep do not divide" % (name, parameter.shape[0], ranks))
            local = parameter.detach().chunk(ranks)[mesh.get_local_rank()].clone()
            setattr(module, key, nn.Parameter(local, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(_Exchange(mesh).sent)
        module.register_forward_hook(_Exchange(mesh).returned)


class _Exchange:
    def __init__(self, mesh):
        self._group, self._ranks = mesh.get_group(), mesh.size()

    def sent(self, _module, inputs):
        """Exchange this rank's tokens of all experts for all ranks' tokens of this rank's experts."""
        tokens, *others = inputs
        experts, count, width = tokens.shape
        exchanged = self._exchanged(tokens).view(self._ranks, experts // self._ranks, count, width)
        return (exchanged.transpose(0, 1).reshape(experts // self._ranks, self._ranks * count, width), *others)

    def returned(self, _module, _inputs, tokens):
        """The way back."""
        experts, count, width = tokens.shape
        by_rank = tokens.view(experts, self._ranks, count // self._ranks, width).transpose(0, 1).reshape(-1, width)
        back = self._exchanged(by_rank)
        return back.view(experts * self._ranks, count // self._ranks, width)

    def _exchanged(self, tokens):
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        flat = tokens.reshape(-1, tokens.shape[-1])
        return all_to_all_single_autograd(flat, None, None, self._group)


@contextlib.contextmanager
def context(mesh, tensors, sequence):
    """Within it each rank has its part of the sequence of these tensors, and attention is that of all ranks."""
    import torch.nn.functional as functional
    from torch.distributed.tensor.experimental import context_parallel

    buffers, dims = [], []
    for each in tensors:
        dim = next((dim for dim in range(1, each.dim()) if each.shape[dim] == sequence), None)
        if dim is not None:
            buffers.append(each)
            dims.append(dim)
    if not buffers:
        raise ValueError("context parallel: no input has a dim of %d tokens" % sequence)
    original = functional.scaled_dot_product_attention
    flash = private.flash_attention
    flash.__name__ = original.__name__  # by which it is replaced
    functional.scaled_dot_product_attention = flash
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)):
            yield
    finally:
        functional.scaled_dot_product_attention = original


def parallelized(model, mesh, plan, precision, units):
    """The model, or a stage of it, as a rank of the mesh holds it; DistributedDataParallel's sums are in `GradientBuckets`.

    Parameters
    ----------
    units
        Names of what `fully_shard` gathers together.
    """
    if "ep" in mesh:
        split_experts(model, mesh.axis("ep"))
    if "tp" in mesh:
        from torch.distributed.tensor.parallel import parallelize_module

        if not plan:
            raise ValueError("no linear layers of known names are split over tp: give a function with --tp-plan")
        if "pp" in mesh:
            plan = _expanded(model, plan)  # without what other stages have
        parallelize_module(model, mesh.axis("tp"), plan)
    if mesh.shards:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if precision != "fp32":
            policy = MixedPrecisionPolicy(param_dtype=dtype_of(precision), reduce_dtype=torch.float32)
        if "ep" in mesh:  # also where each rank has its own: their parameters are cast
            for _, group in experts_of(model):
                fully_shard(group, mesh=mesh.of_experts(), mp_policy=policy)
        of_all, modules = mesh.of_parameters(), dict(model.named_modules())
        for name in units:
            if name in modules:
                fully_shard(modules[name], mesh=of_all, mp_policy=policy)
        fully_shard(model, mesh=of_all, mp_policy=policy)
    return model


def dtype_of(precision):
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


class GradientBuckets:
    """The sums of DistributedDataParallel, whose reducer needs tensors with data: gradients in the order in which they are ready.

    That is the order of its buckets from the second step on.

    Parameters
    ----------
    parameters
        Those whose gradients are summed.
    micro_batches
        Of a step: gradients are summed in the backward pass of the last one.
    """

    def __init__(self, parameters, ranks, bucket_mib, recorder, micro_batches=1):
        self._ranks, self._recorder, self._cap = ranks, recorder, int(bucket_mib * 2**20)
        self._micro_batches, self._passed = micro_batches, {}
        self._order, self._left = [], {}
        self._buckets = None
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter):
        self._passed[id(parameter)] = self._passed.get(id(parameter), 0) + 1
        if self._passed[id(parameter)] % self._micro_batches:
            return
        if self._buckets is None:
            self._order.append(parameter)
            return
        bucket = self._buckets[id(parameter)]
        self._left[bucket] -= 1
        if not self._left[bucket]:
            members = [each for each in self._order if self._buckets[id(each)] == bucket]
            local = [getattr(each, "_local_tensor", each) for each in members]
            self._recorder.collective("all_reduce", sum(each.numel() for each in local), local[0], self._ranks)

    def step_ended(self):
        """Buckets of the order that was seen, for the next step."""
        if self._buckets is None:
            buckets = private.bucket_assignment(self._order, self._cap, min(self._cap, 2**20))
            self._buckets = {id(self._order[index]): number for number, bucket in enumerate(buckets) for index in bucket}
        self._left = {}
        for bucket in self._buckets.values():
            self._left[bucket] = self._left.get(bucket, 0) + 1
