"""Captures the training step of a model without data, devices or other ranks: python dpro_search_capture.py REQUEST ANSWER

REQUEST is a JSON file: script, function, inputs, loss, tp_plan, parallelize (names of functions of the script, or null), batch,
sequence, precision, optimizer, mesh {axis: ranks}, bucket_mib, rotate, schedule, virtual_stages, micro_batches. ANSWER is written:
{"error": ...} or {"steps": {...}, ...}. The step is captured for one device with the batch as given, with twice the batch, and with
twice the sequence, so that it is known how each tensor depends on them; and once under the mesh, or on the first rank of each place
in a pipeline. Each is a process of its own. Needs PyTorch only; Python 3.8 and later.
"""

import contextlib
import copy
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
    for place, rank in enumerate(_first_ranks(request["mesh"])):
        runs["mesh%d" % place] = {"mesh": request["mesh"], "rank": rank}
    answer = {"torch": torch.__version__, "python": sys.version.split()[0], "warning": private.version_warning(), "steps": {}}
    for name, changed in runs.items():
        said = {"plain": "one device", "batch": "twice the batch", "sequence": "twice the sequence"}
        _say(said.get(name) or "rank %d of the mesh" % changed["rank"])
        part = "%s.%s" % (sys.argv[2], name)
        child = os.fork()
        if not child:
            _one({**request, "mesh": {}, "rank": 0, **changed}, part)
        _, status = os.waitpid(child, 0)
        if status or not os.path.exists(part):
            _answer({"error": "the process that captured %s ended with status %d" % (name, status)})
            return
        with open(part) as file:
            captured = json.load(file)
        if "error" in captured:
            if name in ("batch", "sequence"):  # the job is priced at the captured size only
                answer["steps"][name] = None
                answer.setdefault("notes", []).append("no capture of twice the %s: %s" % (name, captured["error"]))
                continue
            _answer({"error": captured["error"] if name == "plain" else "under the mesh: %s" % captured["error"]})
            return
        answer["steps"][name] = captured
    _answer(answer)


def _first_ranks(mesh):
    """First rank of each pipeline stage; rank 0 of a mesh without one. Ranks of ep are in other axes too, and pp is outermost."""
    ranks = 1
    for axis, size in mesh.items():
        ranks *= 1 if axis == "ep" else size
    places = mesh.get("pp", 1)
    return [place * (ranks // places) for place in range(places)] if mesh else []


def _one(request, part):
    """Capture one step in this process, and end it."""
    _end_with_parent()
    code = 0
    try:
        try:
            captured = _captured(request)
        except BaseException as error:
            if os.environ.get("DPRO_SEARCH_CAPTURE_DEBUG"):
                traceback.print_exc()
            captured = {"error": _reason(error)}
        with open(part, "w") as file:
            json.dump(captured, file)
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
    from dpro_search_capture_recorder import GraphRecorder

    torch.manual_seed(0)
    script = _imported(request["script"])
    build, plan_of = _function(script, request, "function"), _function(script, request, "tp_plan")
    by_user = _function(script, request, "parallelize")
    fake = private.fake_mode()
    mesh = meshes.Mesh(request["mesh"], request["rank"]) if request["mesh"] else None
    with torch.device("meta") if mesh is not None else fake:
        model = build()
    if not isinstance(model, torch.nn.Module):
        raise TypeError("%s returns a %s, not a torch.nn.Module" % (request["function"], type(model).__name__))
    model.train()
    plan = None if plan_of is None else plan_of(model)
    about = {
        "layouts": meshes.layouts_of(model, plan),
        "units": [name for name, _ in meshes.units_of(model)],
        "kinds": {name: type(module).__name__ for name, module in model.named_modules()},
        "parameters": _parameters(model),
    }
    tied = _tied(model)
    about["tied"] = bool(tied)
    job = _Job(request, script, model, fake, mesh, by_user is not None)
    stages = job.stages(about["units"], tied) if mesh is not None and "pp" in mesh and by_user is None else None
    if mesh is not None and by_user is not None:
        job.parts = [by_user(model, mesh.whole) or model]
    elif mesh is not None:
        chosen = plan or meshes.usual_plan(about["layouts"])
        job.parts = [meshes.parallelized(part, mesh, chosen, request["precision"], about["units"]) for part in job.parts]
    recorder = GraphRecorder({id(module): name for part in job.parts for name, module in part.named_modules()})
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake)
        for part in job.parts if mesh is not None else ():
            part.to_empty(device="cpu")
            _tie(part, tied)
        _watch_storages(torch, recorder)
        stack.enter_context(_hooks(torch, recorder))
        return {**job.recorded(recorder, stages), **about}


class _Job:
    """A rank's training step: what it reads, and how it runs under a mesh.

    Attributes
    ----------
    parts
        The modules of the rank: the model, or its stages of a pipeline.
    """

    def __init__(self, request, script, model, fake, mesh, by_user):
        import torch

        self.parts = [model]
        self._request, self._fake, self._mesh, self._by_user = request, fake, mesh, by_user
        self._make_inputs, self._loss_of = (_function(script, request, name) for name in ("inputs", "loss"))
        self._micro_batches = 1
        table = next((module for module in model.modules() if isinstance(module, torch.nn.Embedding)), None)
        self._vocabulary = None if table is None else table.num_embeddings

    def stages(self, units, tied):
        """The rank's schedule, to be built when its stages hold what the mesh gives them; `parts` are these stages."""
        import dpro_search_capture_mesh as meshes
        import dpro_search_capture_pipeline as pipelines

        request, mesh = self._request, self._mesh
        self._micro_batches = request["micro_batches"]
        ranks, place = mesh.sizes["pp"], mesh.axis("pp").get_local_rank()
        numbers = pipelines.stages_on(place, ranks, request["virtual_stages"], request["schedule"])
        parts = pipelines.parts_of(self.parts[0], units, ranks * len(numbers))
        self.parts = [parts[number] for number in numbers]
        dtype = meshes.dtype_of(request["precision"]) if mesh.shards else None  # FSDP casts
        copies = [copy.deepcopy(part).to(dtype) for part in parts]
        with self._fake:
            inputs = self._inputs(request["batch"], (request["sequence"] or 0) // mesh.sizes.get("cp", 1) or None)
            with self._cast():
                shapes = pipelines.shapes_of(copies, inputs, lambda part: _tie(part, tied))

        def schedule(recorder):
            how = (request["schedule"], self._micro_batches)
            return pipelines.Pipelined(self.parts, numbers, shapes, mesh.axis("pp"), *how, self._loss, self._cast, recorder)

        return schedule

    def recorded(self, recorder, stages):
        """Record the second step: the first one allocates the optimizer's state, and sets FSDP's order."""
        import torch
        from dpro_search_capture_recorder import OPTIMIZER

        parameters = list({id(each): each for part in self.parts for each in part.parameters()}.values())
        optimizer = _optimizer(torch, parameters, self._request["optimizer"])
        buckets = self._buckets(recorder)
        recorder.parameters.update(recorder.number(_local(each)) for each in parameters)
        buffers = sorted({recorder.number(_local(each)) for part in self.parts for each in part.buffers()})
        pipeline = None if stages is None else stages(recorder)
        for step in range(2):
            if step:
                recorder.start()
            began = time.time()
            inputs = self._inputs(self._request["batch"] * self._micro_batches, self._request["sequence"])
            read = sorted({recorder.number(_local(each)) for each in _tensors(torch, inputs)})
            with recorder, self._context(inputs):
                self._passes(recorder, inputs, pipeline)
                recorder.phase = OPTIMIZER
                if optimizer is not None:
                    optimizer.step()
            gradients = [_local(each.grad) for each in parameters if each.grad is not None]
            gradient_bytes = sum(each.numel() * each.element_size() for each in gradients)
            del gradients
            for each in parameters:
                each.grad = None
            for each in buckets:
                each.step_ended()
        state = 0
        if optimizer is not None:
            held_state = [_local(each) for each in _tensors(torch, list(optimizer.state.values()))]
            state = sum(each.numel() * each.element_size() for each in held_state if each.dim())
        return {
            "ops": recorder.ops,
            "collectives": recorder.collectives,
            "saved": _unique(recorder.saved),
            "parameter_tensors": sorted(recorder.parameters),
            "input_tensors": read,
            "buffer_tensors": buffers,
            "local_parameter_bytes": sum(each.numel() * each.element_size() for each in map(_local, parameters)),
            "gradient_bytes": gradient_bytes,
            "optimizer_bytes": state,
            "held_bytes": recorder.held_bytes,
            "peak_bytes": recorder.peak_bytes,
            "peak_phase": ("forward", "backward", "optimizer")[recorder.peak_phase],
            "seconds": time.time() - began,
        }

    def _passes(self, recorder, inputs, pipeline):
        """Forward and backward."""
        import torch

        recorder.begin_forward()
        with contextlib.ExitStack() as forward:
            forward.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
            if pipeline is not None:
                pipeline.step(inputs)
                return
            forward.enter_context(self._cast())
            (model,) = self.parts
            output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(**inputs)
            loss = self._loss(output, inputs)
        recorder.forward_ended()
        recorder.begin_backward()
        del output
        loss.backward()

    def _loss(self, output, inputs):
        """The loss of outputs and inputs; a pipeline's last stage is given the first of the inputs alone."""
        import torch

        return _loss(torch, output, (inputs,) if isinstance(inputs, torch.Tensor) else inputs, self._loss_of)

    def _inputs(self, samples, sequence):
        import torch

        return _inputs(torch, self._vocabulary, self._make_inputs, samples, sequence)

    def _cast(self):
        """Autocast; FSDP's mixed precision casts in place of it."""
        import dpro_search_capture_mesh as meshes
        import torch

        precision, mesh = self._request["precision"], self._mesh
        if precision == "fp32" or (mesh is not None and mesh.shards and not self._by_user):
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=meshes.dtype_of(precision))

    def _context(self, inputs):
        """Within it inputs are those of one rank of cp."""
        import dpro_search_capture_mesh as meshes
        import dpro_search_capture_torch as private
        import torch

        if self._mesh is None or "cp" not in self._mesh or self._by_user:
            return contextlib.nullcontext()
        private.rotate_by(self._request["rotate"])
        return meshes.context(self._mesh.axis("cp"), list(_tensors(torch, inputs)), self._request["sequence"])

    def _buckets(self, recorder):
        """The sums of gradients without `fully_shard`: of the experts, which fewer ranks share, apart."""
        import dpro_search_capture_mesh as meshes

        if self._mesh is None or self._by_user:
            return []
        experts = [each for part in self.parts for _, group in meshes.experts_of(part) for each in group.parameters()]
        experts = experts if "ep" in self._mesh else []
        alone = {id(each) for each in experts}
        others = [each for part in self.parts for each in part.parameters() if id(each) not in alone]
        return [
            meshes.GradientBuckets(parameters, ranks, self._request["bucket_mib"], recorder, self._micro_batches)
            for parameters, ranks in ((others, self._mesh.summing()), (experts, self._mesh.summing(experts=True)))
            if parameters and len(ranks) > 1 and not self._mesh.shards
        ]


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
    function = getattr(script, name, None)
    if not callable(function):
        known = [key for key, value in vars(script).items() if callable(value) and not key.startswith("_")]
        raise LookupError("%s has no function '%s'; it has %s" % (request["script"], name, ", ".join(known) or "none"))
    return function


def _inputs(torch, vocabulary, make, batch, sequence):
    if make is not None:
        inputs = make(batch, sequence) if sequence else make(batch)
        return (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if vocabulary is None or not sequence:
        what = "a --sequence" if vocabulary is not None else "a function with --inputs"
        raise ValueError("what the model reads is not known: give %s" % what)
    return (torch.randint(vocabulary, (batch, sequence)),)


def _loss(torch, output, inputs, loss_of):
    """The loss by the script's function; else the output's loss, cross-entropy with the next token or with a class, or a mean."""
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if loss_of is not None:
        return loss_of(output, *values)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
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


def _optimizer(torch, parameters, name):
    """Without fused or grouped kernels, whose temporaries are hard to tell from state."""
    parameters = [each for each in parameters if each.requires_grad]
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
    places_of = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places_of.setdefault(id(parameter), []).append((name, key))
    return [places for places in places_of.values() if len(places) > 1]


def _tie(model, groups):
    """Make the places of a parameter one again; a stage of a pipeline may have some of them only."""
    modules = dict(model.named_modules())
    for group in groups:
        here = [(modules[name], key) for name, key in group if name in modules]
        for module, key in here[1:]:
            module._parameters[key] = here[0][0]._parameters[here[0][1]]


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
    row_of = {}
    for number, *rest in saved:
        row_of.setdefault(number, [number, *rest])
    return list(row_of.values())


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


if __name__ == "__main__":
    main()
