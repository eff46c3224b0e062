"""`TorchModel`: a PyTorch module and its optimiser, as NumPy arrays for a parameter server and as tensors for all-reduces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpro_search.runtime.synchronisation.local_model import number_of

if TYPE_CHECKING:
    import torch

    from dpro_search.runtime.synchronisation.local_model import Flat


class TorchModel:
    """See `LocalModel`."""

    framework = "pytorch"

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = optimizer
        self.elements = sum(parameter.numel() for parameter in self._parameters)

    def flat(self) -> Flat:
        flat: Flat = self.tensor().numpy(force=True)
        return flat

    def put(self, flat: Flat) -> None:
        import torch

        self.put_tensor(torch.tensor(flat))

    def update(self, loss: Any = None, batch_size: int | None = None) -> None:
        self._optimizer.step()

    def loss(self, loss: Any) -> float:
        return number_of(loss)

    def tensor(self) -> torch.Tensor:
        """A copy of the parameters, float32, [elements]."""
        import torch

        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self._parameters])

    def gradients(self) -> torch.Tensor:
        """A copy of the gradients, [elements]; zeros where none exists."""
        import torch

        return torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in self._parameters])

    def put_tensor(self, flat: torch.Tensor, *, gradients: bool = False) -> None:
        """Replace the parameters, or their gradients."""
        import torch

        place = 0
        with torch.no_grad():
            for parameter in self._parameters:
                values = flat[place : place + parameter.numel()].view_as(parameter)
                place += parameter.numel()
                if gradients:
                    parameter.grad = values.clone()
                else:
                    parameter.copy_(values)
