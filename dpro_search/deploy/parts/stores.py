"""Parameter servers: MXNet's KVStore and BytePS."""

from __future__ import annotations

from dpro_search.collect.launch.parameter_servers import SERVER_HOSTS
from dpro_search.deploy.parts.part import TRAINER_LINE, JobFacts, Part, Target, numbers, trainer_files
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import BytepsSettings, KvstoreSettings


def kvstore_part(plan: Plan, facts: JobFacts) -> Part:
    """Servers, slicing and compression of MXNet's KVStore."""
    settings = KvstoreSettings.of(plan)
    env = numbers(
        {
            "DMLC_NUM_SERVER": plan.servers,
            "MXNET_KVSTORE_BIGARRAY_BOUND": settings.bigarray_bound,
            "MXNET_KVSTORE_SLICE_THRESHOLD": settings.slice_threshold,
        }
    )
    env |= _server_hosts(plan)
    if settings.p3 is not None:  # an empty variable is the ordinary van; P3's servers do not update
        env |= {"DMLC_PS_VAN_TYPE": "p3" if settings.p3 else "zmq", "MXNET_UPDATE_ON_KVSTORE": "0" if settings.p3 else "1"}
    if plan.compression is None:
        return Part(env=env)
    if plan.compression != "2bit":
        raise InputError(f"compression: MXNet's KVStore has 2bit, not {plan.compression}")
    if settings.p3:
        raise InputError("compression and p3: MXNet's KVStore does not compress priority slices")
    return Part(env=env, files=trainer_files({"compression_params": {"type": "2bit", "threshold": 0.5}}), script=(TRAINER_LINE,))


def byteps_part(plan: Plan, facts: JobFacts) -> Part:
    """Servers, partitions, credit and compression of BytePS."""
    settings = BytepsSettings.of(plan)
    env = numbers(
        {
            "DMLC_NUM_SERVER": plan.servers,
            "BYTEPS_PARTITION_BYTES": settings.partition_bytes,
            "BYTEPS_SCHEDULING_CREDIT": settings.credit,
        }
    )
    env |= _server_hosts(plan)
    if plan.compression not in (None, "fp16"):
        raise InputError(f"compression: BytePS has fp16, not {plan.compression}")
    if plan.compression is None:
        return Part(env=env)
    return Part(env=env, files=trainer_files({"compression_params": {"fp16": True}}), script=(TRAINER_LINE,))


def _server_hosts(plan: Plan) -> dict[str, str]:
    """Variables that our own launcher reads. With another launcher, set them by hand."""
    if plan.servers_on_workers is None:
        return {}
    return {SERVER_HOSTS: "workers" if plan.servers_on_workers else "own"}


MXNET = Target(
    name="mxnet",
    fields=("servers", "servers_on_workers", "bigarray_bound", "p3", "slice_threshold", "compression"),
    part=kvstore_part,
    framework="mxnet",
    communicates=True,
    servers=True,
    why_not={
        "micro_batches": "MXNet's Trainer has no line that accumulates without a change of the gradients' grad_req",
    },
)
BYTEPS = Target(
    name="byteps",
    fields=("servers", "servers_on_workers", "partition_bytes", "credit", "compression"),
    part=byteps_part,
    framework="mxnet",
    communicates=True,
    start="bpslaunch python train.py",
    servers=True,
)
