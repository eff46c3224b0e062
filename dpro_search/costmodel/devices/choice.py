"""Ops to measure on a device: `chosen` from the usual ones, or from those of a job.

Probes come first. The others are those nearest to the centres of clusters of ops (KMeans over what the predictor compares ops by),
the largest cluster first, so that an interrupted measurement holds what stands for most ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.correction import OpPoints
from dpro_search.costmodel.devices.features import base_us, features
from dpro_search.costmodel.devices.ops import Ops, Stack
from dpro_search.costmodel.devices.profile import DeviceProfile, UsualShares, peak_flops_per_s, probe_places
from dpro_search.costmodel.devices.written import STREAMED, OpSpec, ops_of
from dpro_search.errors import InputError

LONGEST_US = 2e5
"""Expected time of the longest op that is measured, unless another is asked for."""
MOST_BYTES = 4e9  # of an op's tensors, where the device's memory is not smaller
_MEMORY_SHARE = 0.2
_USUAL = {"gemm": 500, "batched": 150, "convolution": 150, "attention": 150, "streamed": 60}  # Ops of a kind at a precision.
_BACKWARD = 0.3  # of the ops that have a backward pass


def stack_of(device: Device) -> Stack:
    """How ops of a device's samples were run: in CUDA graphs on a GPU, called one by one on a CPU."""
    return Stack.SERVING if device.kind == "gpu" else Stack.PYTORCH


def precisions_of(device: Device) -> tuple[str, ...]:
    """At which ops are measured: single precision, and 16 bits where the device has units for them."""
    half = next((one for one in ("bf16", "fp16") if device.peak_flops_per_s(one) is not None), None)
    return ("fp32",) if half is None or device.kind == "cpu" else ("fp32", half)


def usual_ops(device: Device, seed: int = 0) -> list[OpSpec]:
    """Ops of transformers and convolutional networks from small to large, at each precision of the device, drawn at random."""
    random = np.random.default_rng(seed)

    def size(low: int, high: int, multiple: int = 1) -> int:
        """Between powers of two, all doublings alike; nine of ten times a power of two or half as much again."""
        drawn = 2.0 ** random.uniform(low, high)
        if random.random() < 0.9:
            power = 2.0 ** np.floor(np.log2(drawn))
            drawn = power * (1.5 if drawn >= 1.5 * power else 1.0)
        return max(round(float(drawn) / multiple), 1) * multiple

    def passes() -> bool:
        return bool(random.random() < _BACKWARD)

    specs: list[OpSpec] = []
    for precision in precisions_of(device):
        specs += [OpSpec.of("gemm", precision, m=4096, n=4096, k=size) for size in (1024, 4096)]
        specs += [OpSpec.of("copy", precision, rows=2**14, length=2**12), OpSpec.of("copy", precision, rows=1, length=64)]
        for _ in range(_USUAL["gemm"]):
            sizes = {"m": size(3, 15), "n": size(6, 14, 8), "k": size(6, 14, 8), "transposes": int(random.random() < 0.5)}
            specs.append(OpSpec.of("gemm", precision, backward=passes(), **sizes))
        for _ in range(_USUAL["batched"]):
            sizes = {"m": size(5, 12), "n": size(5, 12, 8), "k": size(5, 8, 8), "batch": size(2, 9)}
            specs.append(OpSpec.of("gemm", precision, backward=passes(), **sizes))
        for _ in range(_USUAL["convolution"]):
            window = int(random.choice([1, 1, 3, 3, 7]))
            channels = 3 if window == 7 else size(5, 11, 8)
            shape = {
                "images": size(0, 8),
                "inputs": channels,
                "outputs": size(5, 11, 8),
                "side": int(random.choice([7, 14, 28, 56, 112, 224])),
            }
            shape |= {"window": window, "stride": int(random.choice([1, 1, 2])), "padding": window // 2}
            specs.append(OpSpec.of("convolution", precision, backward=passes(), **shape))
        if precision in ("bf16", "fp16"):
            for _ in range(_USUAL["attention"]):
                shape = {
                    "batch": size(0, 6),
                    "heads": size(2, 6),
                    "queries": size(6, 13),
                    "head_dim": int(random.choice([64, 128])),
                }
                specs.append(OpSpec.of("attention", precision, backward=passes(), **shape, causal=int(random.random() < 0.7)))
        for name, op in ((name, op) for name, op in STREAMED.items() if op.timed):
            for _ in range(_USUAL["streamed"]):
                backward = bool(op.backward_tensors) and passes()
                specs.append(OpSpec.of(name, precision, backward=backward, rows=size(3, 18), length=size(6, 15)))
    return list(dict.fromkeys(specs))


def chosen(
    device: Device,
    count: int,
    *,
    job_ops: Sequence[OpSpec] = (),
    longest_us: float = LONGEST_US,
    usual: UsualShares | None = None,
    seed: int = 0,
) -> list[OpSpec]:
    """Ops to measure, at most `count` in all: probes first, then a job's ops or, without any, the usual ones.

    Ops that are expected to take longer than `longest_us`, or whose tensors do not fit, are left out.

    Raises
    ------
    InputError
        Specs of the device are missing, or none of the job's ops can be measured.
    """
    usual = usual or UsualShares()
    profile = DeviceProfile(device=device)
    stack = stack_of(device)

    def feasible(specs: Sequence[OpSpec]) -> tuple[list[OpSpec], Ops | None]:
        most_bytes = min(MOST_BYTES, _MEMORY_SHARE * (device.memory_bytes or np.inf))
        known = [spec for spec in specs if peak_flops_per_s(device, spec.precision) is not None and spec.held_bytes <= most_bytes]
        if not known:
            return [], None
        ops = ops_of(known, stack)
        kept = np.flatnonzero(base_us(ops, profile, usual) <= longest_us + usual.floor_us[0])
        return [known[place] for place in kept.tolist()], ops[kept]

    candidates, ops = feasible(usual_ops(device, seed))
    if ops is None or not len(ops):
        return []
    places = probe_places(ops, device).tolist()
    chosen_specs = [candidates[place] for place in places][:count]
    if job_ops:
        candidates, ops = feasible(sorted(set(job_ops)))
        if ops is None or not len(ops):
            raise InputError(
                f"{device.name}: none of the job's {len(set(job_ops))} ops is expected to take less than {longest_us / 1e6:g} s "
                "at a precision that the device has"
            )
    if ops is None or len(chosen_specs) >= count:
        return chosen_specs
    left = np.array([place for place, spec in enumerate(candidates) if spec not in chosen_specs], dtype=np.int64)
    if not len(left):
        return chosen_specs
    points = OpPoints.of(ops[left], features(ops[left], profile, usual))
    order = nearest_to_centres(points, min(count - len(chosen_specs), len(left)), seed)
    return chosen_specs + [candidates[place] for place in left[order].tolist()]


def nearest_to_centres(points: OpPoints, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Places of one op for each of `count` clusters, the largest cluster first."""
    from sklearn.cluster import KMeans  # dear, and only who measures needs it
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    scaled = (points.at - points.at.mean(axis=0)) / np.maximum(points.at.std(axis=0), 0.1)
    scaled = np.column_stack([scaled, 3.0 * (points.category[:, None] == np.unique(points.category)[None, :])])
    with threadpool_limits(limits=1):  # threads that wait for each other on a busy machine take many times as long as one
        means = KMeans(n_clusters=count, n_init=1, random_state=seed).fit(scaled)
        distance = means.transform(scaled)
    nearest: list[int] = []
    for cluster in np.argsort(-np.bincount(means.labels_, minlength=count)):
        nearest.append(next(int(place) for place in np.argsort(distance[:, cluster]) if int(place) not in nearest))
    return np.array(nearest, dtype=np.int64)
