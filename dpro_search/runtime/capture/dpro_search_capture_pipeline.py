"""The stages of a captured model on one rank of a pipeline, and a step of `torch.distributed.pipelining`'s schedule over them.

A stage is a copy of the model without what other stages have, as PyTorch's documentation splits a model by hand: missing modules
with parameters are None, and lists of layers are shorter. The first stage has what is registered before the layers, the last one
what is registered behind them.
"""

import contextlib
import copy

import dpro_search_capture_torch as private
import torch

# Classes of torch.distributed.pipelining, and those for several stages on a rank.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "ScheduleLoopedBFS"),
    "1f1b": ("Schedule1F1B", "ScheduleInterleaved1F1B"),
    "interleaved": (None, "ScheduleInterleaved1F1B"),
    "zero-bubble": (None, "ScheduleInterleavedZeroBubble"),
    "zero-bubble-v": (None, "ScheduleZBVZeroBubble"),
    "dual-pipe-v": (None, "ScheduleDualPipeV"),
}
V_SHAPED = ("zero-bubble-v", "dual-pipe-v")


def stages_on(rank, ranks, virtual, schedule):
    """Numbers of the stages of a rank."""
    if schedule in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * virtual, ranks))


def parts_of(model, units, count):
    """The model's stages, `count` of them.

    Parameters
    ----------
    units
        Names of the layers, in the order of the forward pass; the first stages have one more where they do not divide.
    """
    if len(units) < count:
        raise ValueError("%d stages need as many layers in a ModuleList or Sequential, and %d are found" % (count, len(units)))
    each, more = divmod(len(units), count)
    stage_of, place = {}, 0
    for stage in range(count):
        for name in units[place : place + each + (stage < more)]:
            stage_of[name] = stage
        place += each + (stage < more)
    parts = []
    for stage in range(count):
        part = copy.deepcopy(model)
        _without_others(part, "", stage_of, stage, [0])
        parts.append(part)
    return parts


def _without_others(module, name, stage_of, stage, reached):
    """Take away what is not of the stage; `reached` is the stage of the last layer that was passed."""
    if stage != reached[0]:
        for key in list(module._parameters):
            module._parameters[key] = None
    for key, child in list(module.named_children()):
        path = "%s.%s" % (name, key) if name else key
        if path in stage_of:
            reached[0] = stage_of[path]
            if stage_of[path] != stage:
                del module._modules[key]  # the others keep their names
        elif any(each.startswith(path + ".") for each in stage_of):
            _without_others(child, path, stage_of, stage, reached)
        elif any(True for _ in child.parameters()) and reached[0] != stage:
            setattr(module, key, None)


class Pipelined:
    """The schedule of one rank.

    Parameters
    ----------
    parts
        This rank's stages, as the mesh's other axes have made them.
    shapes
        (input, output) of every stage of the pipeline for one micro-batch.
    loss_of
        Of a micro-batch's outputs and its targets.
    cast
        Makes the context of forward passes.
    recorder
        Is told which pass runs.
    """

    def __init__(self, parts, numbers, shapes, mesh, schedule, micro_batches, loss_of, cast, recorder):
        from torch.distributed.pipelining import PipelineStage, schedules

        single, several = SCHEDULES[schedule]
        name = several if len(parts) > 1 or single is None else single
        self.stages = [
            PipelineStage(part, number, len(shapes), torch.device("cpu"), *shapes[number], group=mesh.get_group())
            for part, number in zip(parts, numbers)
        ]

        def loss_within(outputs, targets):
            with cast():
                return loss_of(outputs, targets)

        kind = getattr(schedules, name)
        one = issubclass(kind, schedules.PipelineScheduleSingle)
        self._schedule = kind(self.stages[0] if one else self.stages, n_microbatches=micro_batches, loss_fn=loss_within)
        private.shapes_are_known(self._schedule, self.stages)
        for stage in self.stages:
            _tell_passes(stage, cast, recorder)

    def step(self, inputs):
        """Forward and backward passes of all micro-batches; the loss is of outputs and the first of the inputs."""
        arguments = inputs if any(stage.is_first for stage in self.stages) else ()
        losses = {"target": inputs[0], "losses": []} if any(stage.is_last for stage in self.stages) else {}
        self._schedule.step(*arguments, return_outputs=False, **losses)


def _tell_passes(stage, cast, recorder):
    """Let the recorder know of each pass, and of which pass each message is."""

    def told(name, begins=lambda: None, ends=lambda result: None, context=contextlib.nullcontext):
        original = getattr(stage, name)

        def run(*args, **kwargs):
            begins()
            with context():
                result = original(*args, **kwargs)
            ends(result)
            return result

        setattr(stage, name, run)

    told("forward_one_chunk", recorder.begin_forward, lambda result: recorder.forward_ended(), cast)
    told("backward_one_chunk", recorder.begin_backward)
    told("backward_weight_one_chunk", recorder.begin_backward)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops"):
        told(name, ends=lambda messages: recorder.expect(messages, forward=True))
    for name in ("get_bwd_recv_ops", "get_bwd_send_ops"):
        told(name, ends=lambda messages: recorder.expect(messages, forward=False))


def shapes_of(parts, inputs, tie):
    """(inputs, outputs) of each stage for one micro-batch, as tensors without data.

    Parameters
    ----------
    parts
        Copies of all stages on the meta device, with parameters of the type that passes use.
    tie
        Makes parameters of a stage one that were one in the model.
    """
    if not isinstance(inputs, (tuple, list)):
        raise ValueError("a pipeline passes inputs by position: let the function of --inputs return a tuple")
    shapes = []
    for number, run in enumerate(parts):
        run.to_empty(device="cpu")
        tie(run)
        try:
            outputs = run(*inputs)
        except TypeError as error:
            if "NoneType" not in str(error):
                raise
            said = "stage %d of %d lacks a module here: let the forward pass skip modules that are None" % (number, len(parts))
            raise TypeError(said).with_traceback(error.__traceback__) from None
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise ValueError("a stage of a pipeline returns tensors, not a %s" % type(outputs[0]).__name__)
        shapes.append((tuple(inputs), tuple(each.detach().requires_grad_(each.requires_grad) for each in outputs)))
        inputs = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in outputs)
    return shapes
