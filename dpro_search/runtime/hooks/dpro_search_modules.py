"""Marks in a PyTorch profile which module's forward pass is under way, for the modules that a plan can name.

These are the modules that hold parameters and other modules: the blocks of a model, not its single layers. The whole model is none.
Standard library and the framework only; Python 3.8 and later.
"""

MODULE_MARK = "dpro_search.module "  # and the module's path within the model: an annotation around its forward pass


def facts(model):
    """The modules of a model that are marked: path, class, and whether it is a member of a Sequential or ModuleList."""
    return [{"name": name, "type": type(module).__name__, "member": member} for name, module, member in _marked(model)]


class ModuleMarks:
    """The marks of one model; those of a forward pass that an exception ends stay open, and are left out when read."""

    def __init__(self, model):
        self._handles = []
        for name, module, _ in _marked(model):
            self._mark(module, MODULE_MARK + name)

    def _mark(self, module, label):
        from torch.profiler import record_function

        open_marks = []  # of calls within calls

        def begins(module, inputs):
            mark = record_function(label)
            mark.__enter__()
            open_marks.append(mark)

        def ends(module, inputs, output):
            if open_marks:
                open_marks.pop().__exit__(None, None, None)

        self._handles += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]

    def remove(self):
        """Take the marks off the model."""
        for handle in self._handles:
            handle.remove()


def _marked(model):
    """(path, module, whether it is a member) of each; a module of several paths has the first."""
    from torch import nn
    from torch.jit import ScriptModule

    members = {
        id(child) for module in model.modules() if isinstance(module, (nn.Sequential, nn.ModuleList)) for child in module.children()
    }
    for name, module in model.named_modules():
        if not name or isinstance(module, (nn.ModuleList, nn.ModuleDict, ScriptModule)):
            continue  # lists are not called, and compiled modules take no hooks
        if any(True for _ in module.children()) and any(True for _ in module.parameters()):
            yield name, module, id(module) in members
