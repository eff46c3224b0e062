"""A small network of MXNet with two paths, joined by a sum."""

from mxnet.gluon import nn


class Shortcut(nn.HybridBlock):
    """A block with two paths, joined by a sum."""

    def __init__(self, width):
        super().__init__()
        with self.name_scope():
            self.inner = nn.HybridSequential()
            self.inner.add(nn.Dense(width, activation="relu"), nn.Dense(width))

    def hybrid_forward(self, _, hidden):
        return hidden + self.inner(hidden)


def shortcuts(width=96):
    """A layer, two such blocks and a layer."""
    net = nn.HybridSequential()
    net.add(nn.Dense(width, activation="relu"), Shortcut(width), Shortcut(width), nn.Dense(10))
    return net
