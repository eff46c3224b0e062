"""Steps and units of fully sharded models (``torch.distributed.fsdp.fully_shard``), for the PyTorch recorder.

Standard library and the framework only; Python 3.8 and later.
"""

from dpro_search_process import replaces


def patch(module, recorder):
    """Notify the recorder of each forward pass of a whole model; `module` is the one that has FSDP's state."""

    @replaces(module.FSDPState, "_root_pre_forward")
    def root_pre_forward(original, self, root, *args, **kwargs):
        if self._state_ctx.iter_forward_root is None:  # else the forward pass of a unit within a model's
            recorder.forward_begins(root, "fsdp", facts, lambda: any(group.reduce_grads for group in _groups(root)))
        return original(self, root, *args, **kwargs)


def facts(model):
    """The units of a model, each with the indices of its parameters, and the parameters as they are without sharding."""
    from torch import distributed

    parameters, index_of = [], {}
    for name, parameter in model.named_parameters():
        index_of[name] = len(parameters)
        parameters.append(
            {
                "name": name,
                "dtype": str(parameter.dtype).replace("torch.", ""),
                "shape": list(parameter.shape),
                "size_bytes": parameter.numel() * parameter.element_size(),
            }
        )
    return {
        "units": [_unit(group, index_of) for group in _groups(model)],
        "world_size": distributed.get_world_size(),
        "backend": distributed.get_backend(),
        "parameters": parameters,
    }


def _unit(group, index_of):
    ranks = getattr(group.mesh_info, "shard_mesh_size", 1)
    return {
        "name": group._module_fqn or "",
        "parameters": [index_of[member._param_fqn] for member in group.fsdp_params if member._param_fqn in index_of],
        "ranks": ranks,
        "gathered_bytes": sum(
            member.padded_sharded_param_size.numel() * ranks * (member.param_dtype or member.orig_dtype).itemsize
            for member in group.fsdp_params
        ),
        "reshards": group.post_forward_mesh_info is not None,
        "asynchronous": bool(group.unshard_async_op),
    }


def _groups(model):
    """The group of parameters of every unit; older versions of PyTorch have one a state."""
    seen = set()
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        if state is None or id(state) in seen:
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                yield group
