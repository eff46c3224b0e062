"""A feature map that convolutions and poolings pass on: it records the ops of an image model with their dims."""

from __future__ import annotations

Op = tuple[str, tuple[int, ...]]


class Image:
    """Square feature maps [batch, channels, height, height] of one model, and the ops that were run on them so far."""

    def __init__(self, height: int, batch: int = 1, channels: int = 3) -> None:
        self.ops: list[Op] = []
        self.height = height
        self.channels = channels
        self.batch = batch

    @property
    def elements(self) -> int:
        """Numbers in the current feature map."""
        return self.batch * self.channels * self.height * self.height

    def record(self, op: str, *dims: int) -> None:
        """Appends an op; dims of batch 1 do not name the batch."""
        self.ops.append((op, (*dims, self.batch) if self.batch > 1 else dims))

    def conv(self, filters: int, kernel: int, stride: int = 1, padding: int | None = None, groups: int = 1) -> None:
        """A convolution with bias and ReLU; `padding` None keeps the height at stride 1."""
        pad = kernel // 2 if padding is None else padding
        if groups == 1:
            self.record("conv2d", self.channels, self.height, filters, kernel, stride, pad)
        elif groups == self.channels == filters:
            self.record("depthwise", self.channels, self.height, kernel, stride, pad)
        else:
            self.record("grouped_conv2d", self.channels, self.height, filters, kernel, stride, pad, groups)
        self.channels, self.height = filters, (self.height + 2 * pad - kernel) // stride + 1

    def depthwise(self, kernel: int, stride: int = 1) -> None:
        """A convolution of each channel on its own."""
        self.conv(self.channels, kernel, stride, groups=self.channels)

    def rectangular(self, filters: int, kernel_height: int, kernel_width: int) -> None:
        """A convolution with a kernel such as 1 x 7 that keeps height and width."""
        kernel = (kernel_height, kernel_width, 1, 1, kernel_height // 2, kernel_width // 2)
        self.record("rectangular_conv2d", self.channels, self.height, self.height, filters, *kernel)
        self.channels = filters

    def transposed(self, filters: int, kernel: int, stride: int, padding: int) -> None:
        """A transposed convolution: the height grows `stride`-fold."""
        self.record("transposed_conv2d", self.channels, self.height, filters, kernel, stride, padding)
        self.channels, self.height = filters, (self.height - 1) * stride - 2 * padding + kernel

    def pool(self, kernel: int, stride: int, padding: int = 0, op: str = "max_pool") -> None:
        """`max_pool` or `average_pool`."""
        self.record(op, self.channels, self.height, kernel, stride, padding)
        self.height = (self.height + 2 * padding - kernel) // stride + 1

    def elementwise(self, op: str) -> None:
        """An op of one or two tensors of the feature map's size."""
        self.ops.append((op, (self.elements,)))

    def concatenate(self, channels: int) -> None:
        """Appends `channels` channels of another feature map."""
        self.record("concat", self.channels, channels, self.height)
        self.channels += channels

    def squeeze_excite(self, squeezed: int) -> None:
        """Mean over the map, two dense layers, and a scale of each channel (Hu et al. 2018)."""
        self.record("mean_pool", self.channels, self.height)
        self.ops += [("dense", (self.batch, squeezed, self.channels)), ("dense", (self.batch, self.channels, squeezed))]
        self.record("channel_scale", self.channels, self.height)

    def classify(self, classes: int = 1000) -> None:
        """Mean over the map, a dense layer, and probabilities."""
        self.record("mean_pool", self.channels, self.height)
        self.ops += [("dense", (self.batch, classes, self.channels)), ("softmax", (self.batch, classes))]
