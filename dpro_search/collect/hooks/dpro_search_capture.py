"""Captures the training step of a model without data, devices or other ranks: python dpro_search_capture.py REQUEST ANSWER

REQUEST is a JSON file: script, function, inputs, loss, tp_plan, parallelize (names of functions of the script, or null), batch,
sequence, precision, optimizer, mesh {axis: ranks}, bucket_mib. ANSWER is written: {"error": ...} or {"steps": {...}, ...}. The step
is captured for one device with the batch as given, with twice the batch, and with twice the sequence, so that it is known how each
tensor depends on them; and once under the mesh. Each is a process of its own. Needs PyTorch only; Python 3.8 and later.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

_HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    _end_with_parent()
    with open(sys.argv[1]) as file:
        request = json.load(file)
    _say("importing PyTorch")
    try:
        import torch
    except ImportError as error:
        _answer({"error": "%s cannot import torch: %s" % (sys.executable, error)})
        return
    import dpro_search_capture_torch as private

    runs = {"plain": {}, "batch": {"batch": 2 * request["batch"]}}
    if request["sequence"]:
        runs["sequence"] = {"sequence": 2 * request["sequence"]}
    if request["mesh"]:
        runs["mesh"] = {"mesh": request["mesh"]}
    answer = {"torch": torch.__version__, "python": sys.version.split()[0], "warning": private.version_warning(), "steps": {}}
    for name, changed in runs.items():
        _say({"plain": "one device", "batch": "twice the batch", "sequence": "twice the sequence", "mesh": "the mesh"}[name])
        part = "%s.%s" % (sys.argv[2], name)
        child = os.fork()
        if not child:
            _one({**request, "mesh": {}, **changed}, part)
        _, status = os.waitpid(child, 0)
        if status or not os.path.exists(part):
            _answer({"error": "the process that captured %s ended with status %d" % (name, status)})
            return
        with open(part) as file:
            found = json.load(file)
        if "error" in found:
            if name in ("batch", "sequence"):  # the job is priced at the captured size only
                answer["steps"][name] = None
                answer.setdefault("notes", []).append("no capture of twice the %s: %s" % (name, found["error"]))
                continue
            _answer({"error": found["error"] if name == "plain" else "under the mesh: %s" % found["error"]})
            return
        answer["steps"][name] = found
    _answer(answer)


def _one(request, part):
    """Capture one step in this process, and end it."""
    _end_with_parent()
    code = 0
    try:
        try:
            found = _captured(request)
        except BaseException as error:
            if os.environ.get("DPRO_SEARCH_CAPTURE_DEBUG"):
                traceback.print_exc()
            found = {"error": _reason(error)}
        with open(part, "w") as file:
            json.dump(found, file)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _captured(request):
    import dpro_search_capture_mesh as meshes
    import dpro_search_capture_torch as private
    import torch
    from dpro_search_capture_recorder import BACKWARD, FORWARD, OPTIMIZER, Recorder

    torch.manual_seed(0)
    script = _imported(request["script"])
    build = _function(script, request, "function")
    make_inputs, loss_of, plan_of = (_function(script, request, name) for name in ("inputs", "loss", "tp_plan"))
    by_user = _function(script, request, "parallelize")
    sizes = request["mesh"]
    fake = private.fake_mode()
    mesh = None
    if sizes:
        from torch.distributed.device_mesh import init_device_mesh

        ranks = 1
        for size in sizes.values():
            ranks *= size
        private.start_fake_group(ranks)
        names = [name for name in meshes.AXES if name in sizes]
        mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    with torch.device("meta") if mesh is not None else fake:
        model = build()
    if not isinstance(model, torch.nn.Module):
        raise TypeError("%s returns a %s, not a torch.nn.Module" % (request["function"], type(model).__name__))
    model.train()
    plan = None if plan_of is None else plan_of(model)
    layouts = meshes.layouts_of(model, plan)
    units = [name for name, _ in meshes.units_of(model)]
    tied = _tied(model)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    whole = _parameters(model)
    names = {id(module): name for name, module in model.named_modules()}
    recorder = Recorder(names)
    precision = request["precision"]
    if mesh is not None:
        if by_user is not None:
            model = by_user(model, mesh) or model
        else:
            model = meshes.parallelized(model, mesh, plan or meshes.usual_plan(layouts), precision, request["bucket_mib"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake)
        if mesh is not None:
            model.to_empty(device="cpu")
            _tie(model, tied)
        batch, sequence = _own_batch(request, sizes), request["sequence"]
        inputs = _inputs(torch, model, make_inputs, batch, sequence)
        optimizer = _optimizer(torch, model, request["optimizer"])
        buckets = None
        if sizes.get("dp_replicate", 1) > 1 and "dp_shard" not in sizes and by_user is None:
            ranks = torch.distributed.get_process_group_ranks(mesh["dp_replicate"].get_group())
            buckets = meshes.GradientBuckets(model, ranks, request["bucket_mib"], recorder)
        _watch_storages(torch, recorder)
        stack.enter_context(_hooks(torch, recorder))
        recorder.parameters.update(recorder.number(_local(each)) for each in model.parameters())
        for each in (*model.buffers(), *_tensors(torch, inputs)):
            recorder.number(_local(each))
        autocast = precision != "fp32" and not _casts_itself(mesh, by_user)
        for step in range(2):  # the first one allocates the optimizer's state, and sets FSDP's order
            if step:
                recorder.start()
            began = time.time()
            with recorder:
                recorder.phase = FORWARD
                with contextlib.ExitStack() as forward:
                    forward.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
                    if autocast:
                        forward.enter_context(torch.autocast("cpu", dtype=meshes.dtype_of(precision)))
                    output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(**inputs)
                    loss = _loss(torch, output, inputs, loss_of)
                recorder.forward_ended()
                held = recorder.live_bytes
                recorder.phase = BACKWARD
                del output
                loss.backward()
                recorder.phase = OPTIMIZER
                if optimizer is not None:
                    optimizer.step()
            gradients = [_local(each.grad) for each in model.parameters() if each.grad is not None]
            gradient_bytes = sum(each.numel() * each.element_size() for each in gradients)
            del gradients, loss
            if optimizer is not None:
                optimizer.zero_grad()
            else:
                model.zero_grad()
            if buckets is not None:
                buckets.step_ended()
        state = 0
        if optimizer is not None:
            held_state = [_local(each) for each in _tensors(torch, list(optimizer.state.values()))]
            state = sum(each.numel() * each.element_size() for each in held_state if each.dim())
        return {
            "ops": recorder.ops,
            "collectives": recorder.collectives,
            "saved": _unique(recorder.saved),
            "parameter_tensors": sorted(recorder.parameters),
            "input_tensors": sorted({recorder.number(_local(each)) for each in _tensors(torch, inputs)}),
            "buffer_tensors": sorted({recorder.number(_local(each)) for each in model.buffers()}),
            "parameters": whole,
            "local_parameter_bytes": sum(
                each.numel() * each.element_size() for each in map(_local, {id(p): p for p in model.parameters()}.values())
            ),
            "gradient_bytes": gradient_bytes,
            "optimizer_bytes": state,
            "held_bytes": held,
            "peak_bytes": recorder.peak_bytes,
            "peak_phase": ("forward", "backward", "optimizer")[recorder.peak_phase],
            "kinds": kinds,
            "units": units,
            "layouts": layouts,
            "tied": bool(tied),
            "seconds": time.time() - began,
        }


def _casts_itself(mesh, by_user):
    """Whether FSDP's mixed precision casts in place of autocast."""
    return mesh is not None and by_user is None and "dp_shard" in mesh.mesh_dim_names


def _own_batch(request, sizes):
    """`batch` is that of one replica."""
    return request["batch"]


def _imported(path):
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location("dpro_search_captured_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _function(script, request, role):
    name = request.get(role)
    if name is None:
        return None
    found = getattr(script, name, None)
    if not callable(found):
        known = [key for key, value in vars(script).items() if callable(value) and not key.startswith("_")]
        raise LookupError("%s has no function '%s'; it has %s" % (request["script"], name, ", ".join(known) or "none"))
    return found


def _inputs(torch, model, make, batch, sequence):
    if make is not None:
        found = make(batch, sequence) if sequence else make(batch)
        return (found,) if isinstance(found, torch.Tensor) else found
    table = next((module for module in model.modules() if isinstance(module, torch.nn.Embedding)), None)
    if table is None or not sequence:
        what = "a --sequence" if table is not None else "a function with --inputs"
        raise ValueError("what the model reads is not known: give %s" % what)
    return (torch.randint(table.num_embeddings, (batch, sequence)),)


def _loss(torch, output, inputs, loss_of):
    """Of a function of the script; else the output's own, cross-entropy with the next token or with a class, or a mean."""
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if loss_of is not None:
        return loss_of(output, *values)
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if own is not None:
        return own
    if isinstance(output, dict):
        output = next(iter(output.values()))
    if isinstance(output, (tuple, list)):
        output = output[0]
    if not isinstance(output, torch.Tensor):
        raise ValueError("the model returns a %s: give a function of its output and inputs with --loss" % type(output).__name__)
    if output.dim() == 0:
        return output
    tokens = next((each for each in values if isinstance(each, torch.Tensor) and not each.is_floating_point()), None)
    if tokens is not None and output.dim() == 3 and output.shape[:2] == tokens.shape:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())
    if output.dim() == 2:
        labels = torch.randint(output.shape[1], (output.shape[0],))
        return torch.nn.functional.cross_entropy(output.float(), labels)
    return output.float().mean()


def _optimizer(torch, model, name):
    """Without fused or grouped kernels, whose temporaries are hard to tell from state."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    if name == "none" or not parameters:
        return None
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[name](parameters, lr=1e-3, foreach=False)


def _parameters(model):
    """[name, shape, dtype, whether it is trained] of each, once."""
    return [
        [name, list(each.shape), str(each.dtype).replace("torch.", ""), each.requires_grad]
        for name, each in model.named_parameters()
    ]


def _tied(model):
    """Groups of (module, key) that hold one parameter."""
    found = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((name, key))
    return [places for places in found.values() if len(places) > 1]


def _tie(model, groups):
    modules = dict(model.named_modules())
    for (first, key), *others in groups:
        for name, other in others:
            modules[name]._parameters[other] = modules[first]._parameters[key]


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def _tensors(torch, value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(torch, each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(torch, each)


def _unique(saved):
    """Each storage once, with the first op that needs it."""
    found = {}
    for number, *rest in saved:
        found.setdefault(number, [number, *rest])
    return list(found.values())


@contextlib.contextmanager
def _hooks(torch, recorder):
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    before = register_module_forward_pre_hook(recorder.entered)
    behind = register_module_forward_hook(recorder.left, always_call=True)
    try:
        yield
    finally:
        before.remove()
        behind.remove()


def _watch_storages(torch, recorder):
    """FSDP frees and allocates by resizing storages, which no op says."""
    original = torch.UntypedStorage.resize_

    def resize(storage, size):
        result = original(storage, size)
        recorder.resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize


def _reason(error):
    """One line: what is wrong, and where in the user's code."""
    import dpro_search_capture_torch as private
    import torch

    library = os.path.dirname(os.path.abspath(torch.__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((library, _HERE, "<")) and "importlib" not in frame.filename
    ]
    where = "%s:%d: " % (frames[-1].filename, frames[-1].lineno) if frames else ""
    line = (frames[-1].line or "").strip() if frames else ""
    if private.needs_values(error):
        what = "needs the values of a tensor, which a captured step does not have"
        return "%s%s%s: control flow, shapes and Python numbers may not depend on data" % (
            where,
            "'%s' " % line if line else "",
            what,
        )
    text = " ".join(str(error).split())
    return "%s%s%s" % (
        where,
        "" if isinstance(error, (ValueError, LookupError)) and not frames else type(error).__name__ + ": ",
        text[:400],
    )


def _end_with_parent():
    """On Linux this process ends when the one that started it does, however that ends."""
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _say(what):
    print("capture: %s" % what, file=sys.stderr, flush=True)


def _answer(value):
    with open(sys.argv[2], "w") as file:
        json.dump(value, file)


main()
