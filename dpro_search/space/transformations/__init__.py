"""Transformations: the kinds of changes that a plan is made of.

Each is one class, which knows the plan fields that are its own, which values are legal for a job and why others are not, and how
to move from one plan to a neighbour. A `PlanSpace` composes those that a kind of job knows. What a plan does to a job is done by
``apply`` functions: `space/tensorflow/apply_plan.py` (Horovod), `space/programs/ddp_job.py`, `kvstore_under`, `byteps_under`, and,
for what changes compute, ``transformed`` of `compute.py`. Transformations of compute are imported from their modules, as they need
a compiler.
"""

from dpro_search.space.transformations._base import RECORDED, Choice, Knob, PlanningFacts, PlanSpace, Switch, Transformation
from dpro_search.space.transformations.buckets import BucketSize, BucketViews, FirstBucketSize, StaticGraph
from dpro_search.space.transformations.gradient_compression import BytepsCompression, DdpCompression, KvstoreCompression
from dpro_search.space.transformations.horovod import HOROVOD_DEFAULT, horovod_facts, horovod_space
from dpro_search.space.transformations.parameter_servers import (
    Credit,
    KeySlicing,
    ServerCount,
    ServerPlacement,
    TensorPartition,
    byteps_under,
    kvstore_under,
)

__all__ = [
    "HOROVOD_DEFAULT",
    "RECORDED",
    "BucketSize",
    "BucketViews",
    "BytepsCompression",
    "Choice",
    "Credit",
    "DdpCompression",
    "FirstBucketSize",
    "KeySlicing",
    "Knob",
    "KvstoreCompression",
    "PlanSpace",
    "PlanningFacts",
    "ServerCount",
    "ServerPlacement",
    "StaticGraph",
    "Switch",
    "TensorPartition",
    "Transformation",
    "byteps_under",
    "horovod_facts",
    "horovod_space",
    "kvstore_under",
]
