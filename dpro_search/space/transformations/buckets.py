"""Gradient buckets of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from functools import cached_property

from dpro_search.space.transformations._base import Choice, Knob, Switch, geometric

_SMALLEST_BYTES = 256 * 1024
_FACTOR = 2**0.5


class BucketSize(Knob):
    """Size at which a bucket is closed: DDP's ``bucket_cap_mb``."""

    name = "bucket-size"
    fields = ("bucket_cap_bytes",)

    @cached_property
    def choice(self) -> Choice:
        # A bucket is closed by the tensor that fills it: beyond all bytes together, a larger size changes nothing.
        total = sum(tensor.size_bytes for tensor in self.job.tensors)
        sizes = geometric(_SMALLEST_BYTES, max(2 * total, _SMALLEST_BYTES), _FACTOR, multiple_of=64 * 1024)
        return self.chosen_from(sizes)


class FirstBucketSize(BucketSize):
    """The same of the first bucket alone: the first of DDP's ``bucket_cap_mb_list``."""

    name = "first-bucket-size"
    fields = ("first_bucket_bytes",)


class BucketViews(Switch):
    """Gradients are views of the buckets, and not copied out of them: DDP's ``gradient_as_bucket_view``."""

    name = "bucket-views"
    fields = ("gradient_as_bucket_view",)
    turned = True


class StaticGraph(Switch):
    """Every step uses the same parameters, and none are searched that were not used: DDP's ``static_graph``."""

    name = "static-graph"
    fields = ("static_graph",)
    turned = True
