"""`GluonModel` and `MxnetModule`: a model of MXNet and its optimiser, as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro_search.errors import InputError
from dpro_search.runtime.synchronisation.local_model import Flat, LocalModel, number_of


def mxnet_model(model: Any, optimizer: Any) -> LocalModel:
    """The local model of a Gluon block with its `Trainer`, or of a `Module` with its own optimizer."""
    import mxnet as mx

    if isinstance(model, mx.mod.BaseModule):
        return MxnetModule(model)
    if not isinstance(optimizer, mx.gluon.Trainer):
        raise InputError("synchronise: with a Gluon block goes its gluon.Trainer, made with kvstore=None")
    return GluonModel(model, optimizer)


class GluonModel:
    """See `LocalModel`."""

    framework = "mxnet"

    def __init__(self, block: Any, trainer: Any) -> None:
        from mxnet.gluon.parameter import DeferredInitializationError

        if "dist" in str(getattr(trainer._kvstore_params["kvstore"], "type", trainer._kvstore_params["kvstore"])):
            raise InputError("synchronise: make the Trainer with kvstore=None: it must update this worker's model only")
        self._trainer = trainer
        self._parameters = [each for each in block.collect_params().values() if each.grad_req != "null"]
        try:
            self.elements = sum(each.data(each.list_ctx()[0]).size for each in self._parameters)
        except DeferredInitializationError:
            raise InputError("synchronise: the block's shapes are not known yet: call it with one batch before") from None
        except RuntimeError:
            raise InputError("synchronise: the block has no parameters yet: call block.initialize() before") from None

    def flat(self) -> Flat:
        return np.concatenate([each.list_data()[0].asnumpy().reshape(-1).astype(np.float32) for each in self._parameters])

    def put(self, flat: Flat) -> None:
        place = 0
        for parameter in self._parameters:
            size = parameter.list_data()[0].size
            for data in parameter.list_data():
                data[:] = flat[place : place + size].reshape(data.shape)
            place += size

    def update(self, loss: Any, batch_size: int | None) -> None:
        if batch_size is None:
            if loss is None:
                raise InputError("synchronise: call step(loss), or step(batch_size=...) for a Gluon block")
            batch_size = getattr(loss, "size", 1)
        self._trainer.step(batch_size)

    def loss(self, loss: Any) -> float:
        return number_of(loss.mean().asscalar() if hasattr(loss, "asscalar") else loss)


class MxnetModule:
    """See `LocalModel`."""

    framework = "mxnet"

    def __init__(self, module: Any) -> None:
        if not module.optimizer_initialized:
            raise InputError("synchronise: call module.init_optimizer(kvstore=None, ...) before")
        if getattr(module, "_kvstore", None) is not None and "dist" in module._kvstore.type:
            raise InputError("synchronise: call module.init_optimizer with kvstore=None: it must update this worker's model only")
        self._module = module
        self._names = sorted(module.get_params()[0])
        self.elements = len(self.flat())

    def flat(self) -> Flat:
        arrays = self._module.get_params()[0]
        return np.concatenate([arrays[name].asnumpy().reshape(-1).astype(np.float32) for name in self._names])

    def put(self, flat: Flat) -> None:
        import mxnet as mx

        arrays, others = self._module.get_params()
        ends = np.cumsum([arrays[name].size for name in self._names])[:-1]
        new = {name: mx.nd.array(part.reshape(arrays[name].shape)) for name, part in zip(self._names, np.split(flat, ends))}
        self._module.set_params(new, others)

    def update(self, loss: Any, batch_size: int | None) -> None:
        self._module.update()

    def loss(self, loss: Any) -> float:
        return number_of(loss.mean().asscalar() if hasattr(loss, "asscalar") else loss)
