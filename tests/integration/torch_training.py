"""What the small PyTorch jobs of these tests have in common, beside the model and its strategy."""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn


def begun():
    """Join the other ranks; the parts of HOW, and the number of steps, from the command line."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    return sys.argv[1].split(","), int(sys.argv[2]) if len(sys.argv) > 2 else 14


def batch():
    """Inputs and labels, other ones on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn((32, 64), generator=generator), torch.randint(10, (32,), generator=generator)


def step(model, optimizer, inputs, labels, by_hand):
    """A forward pass, a backward pass and an update, `by_hand` without torch.optim; the loss."""
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    if by_hand:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    else:
        optimizer.step()
    return loss


def ended(loss):
    """Print the loss, to the last bit, and leave the other ranks.

    The caller keeps no model: one holds on to the group, whose threads then now and then abort a process that ends (seen in 2 of 14
    runs).
    """
    print(float(loss.detach()).hex())
    gc.collect()
    dist.destroy_process_group()
