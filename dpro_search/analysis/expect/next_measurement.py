"""`measurements`: how much a further measurement is expected to tell about the cause, for its cost in device-minutes.

The information that a measurement gives about the cause is the expected loss of entropy of the causes' probabilities (Lindley 1956,
"On a measure of the information provided by an experiment"), by draws of causes, severities and errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from dpro_search.analysis.expect.posterior import Beliefs, Floats, log_t, noise_of, normalised, of_causes
from dpro_search.analysis.expect.quantities import ABOUT, Quantity

DRAWS = 400
_ENOUGH = 0.5  # The cheapest measurement that tells this share of what the best one tells comes first.
_TOO_LITTLE_BITS = 0.02


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement that has not been made.

    Attributes
    ----------
    name, words
        Its name, as ``--measured`` takes it, and in words.
    information_bits
        By how much it is expected to lower the entropy of the causes.
    entropy_bits
        The entropy now.
    device_minutes
        Its cost: minutes times the devices that take part.
    command
        A command that makes it; it prints a line that ``--also`` reads, or says what to look at.
    """

    name: str
    words: str
    information_bits: float
    entropy_bits: float
    device_minutes: float
    command: str


_GEMM = (
    "python -c \"import torch,time; {before}a=torch.randn(8192,8192,device='cuda',dtype=torch.{dtype}); "
    "[a@a for _ in range(50)]; torch.cuda.synchronize(); t=time.time(); [a@a for _ in range(200)]; torch.cuda.synchronize(); "
    "print(f'gemm={{2*8192**3*200/(time.time()-t)/1e12:.0f}}TFLOP/s')\""
)
_GEMM_ON_CORE = (
    'OMP_NUM_THREADS=1 python -c "import torch,time; a=torch.randn(2048,2048,dtype=torch.{dtype}); '
    "[a@a for _ in range(3)]; t=time.time(); [a@a for _ in range(20)]; "
    "print(f'gemm={{2*2048**3*20/(time.time()-t)/1e12:.4f}}TFLOP/s')\""
)
_ALL_REDUCE_ON_CORES = (
    'torchrun --nnodes {hosts} --nproc-per-node {per_host} --no-python python -c "import torch,time,torch.distributed as d; '
    "d.init_process_group('gloo'); a=torch.zeros(2**26); d.all_reduce(a); t=time.time(); d.all_reduce(a); "
    "print(f'all_reduce={{2*(1-1/d.get_world_size())*2**28/(time.time()-t)/1e9:.4f}}GB/s')\"   # with --rdzv-endpoint as in the job"
)
_TF32 = "torch.backends.cuda.matmul.allow_tf32=True; "
_DTYPES = {"bf16": ("bfloat16", ""), "fp16": ("float16", ""), "fp32": ("float32", ""), "tf32": ("float32", _TF32)}
"""Type of a tensor in PyTorch, and a statement before, for products in a precision. Narrow types need kernels of their own."""
_MINUTES = {  # of the devices that take part (estimated)
    Quantity.STEP: 2.0,
    Quantity.MEDIAN_STEP: 0.1,
    Quantity.MEMORY: 0.1,
    Quantity.UTILISATION: 0.2,
    Quantity.POWER: 0.2,
    Quantity.GEMM: 0.5,
    Quantity.ALL_REDUCE: 1.0,
    Quantity.ONE_HOST: 5.0,
}
_NAMES = {
    Quantity.STEP: "step_time",
    Quantity.MEDIAN_STEP: "median_step_time",
    Quantity.MEMORY: "memory",
    Quantity.UTILISATION: "utilisation",
    Quantity.POWER: "power",
    Quantity.GEMM: "gemm",
    Quantity.ALL_REDUCE: "all_reduce",
    Quantity.ONE_HOST: "one_host_step_time",
}


def measurements(
    beliefs: Beliefs, devices: int, per_host: int, precision: str, rng: np.random.Generator, *, on_gpus: bool = True
) -> list[Measurement]:
    """All measurements that have not been made and tell something, the one to make first at the front.

    That is the cheapest of those that tell at least half as much as any.
    """
    entropy = entropy_bits(beliefs, beliefs.probabilities[None])[0]
    taking_part = {Quantity.GEMM: 1, Quantity.ONE_HOST: per_host}
    listed = []
    for quantity in beliefs.spread.quantities:
        if quantity in beliefs.measured:
            continue
        bits = information_bits(beliefs, quantity, rng)
        if bits > _TOO_LITTLE_BITS:
            minutes = _MINUTES[quantity] * taking_part.get(quantity, devices)
            words, command = ABOUT[quantity].words, _command(quantity, devices, per_host, precision, on_gpus=on_gpus)
            listed.append(
                Measurement(
                    name=_NAMES[quantity],
                    words=words,
                    information_bits=bits,
                    entropy_bits=float(entropy),
                    device_minutes=minutes,
                    command=command,
                )
            )
    most = max((each.information_bits for each in listed), default=0.0)
    return sorted(listed, key=lambda each: (each.information_bits < _ENOUGH * most, each.device_minutes, -each.information_bits))


def information_bits(beliefs: Beliefs, quantity: Quantity, rng: np.random.Generator) -> float:
    """Expected loss of entropy of the causes by a measurement of a quantity."""
    names = [*beliefs.measured, quantity]
    shift, seen = beliefs.moved(names), np.array(list(beliefs.measured.values()))
    sides = np.ones(len(names))
    both_sides = (beliefs.spread.of(names, sides) + beliefs.spread.of(names, -sides)) / 2
    covariance = both_sides + noise_of(names) + of_causes(shift)  # [hypotheses, quantities, quantities]
    logs = np.log([one.prior for one in beliefs.hypotheses])
    before = normalised(logs + log_t(seen - shift[:, :-1], covariance[:, :-1, :-1])) if len(seen) else normalised(logs)
    drawn = rng.choice(len(logs), size=DRAWS, p=before)
    known, last = covariance[drawn, :-1, :-1], covariance[drawn, -1, :-1]
    gain = np.linalg.solve(known, last[..., None])[..., 0] if len(seen) else last
    middle = shift[drawn, -1] + np.sum((seen - shift[drawn, :-1]) * gain, axis=1)
    width = np.sqrt(np.maximum(covariance[drawn, -1, -1] - np.sum(last * gain, axis=1), 1e-12))
    values = middle + width * rng.standard_normal(DRAWS)
    observed = np.column_stack([np.tile(seen, (DRAWS, 1)), values])
    after = logs + log_t(observed[:, None, :] - shift[None], covariance[None])
    return float(entropy_bits(beliefs, before[None])[0] - entropy_bits(beliefs, normalised(after)).mean())


def entropy_bits(beliefs: Beliefs, probabilities: Floats) -> Floats:
    """Entropy of the causes, whatever their severity, for each row of probabilities of the hypotheses, [rows]."""
    causes: Sequence[tuple[str, ...]] = [one.causes for one in beliefs.hypotheses]
    places: Mapping[tuple[str, ...], int] = {cause: number for number, cause in enumerate(dict.fromkeys(causes))}
    sums = np.zeros((len(probabilities), len(places)))
    for number, cause in enumerate(causes):
        sums[:, places[cause]] += probabilities[:, number]
    return np.asarray(-(sums * np.log2(np.maximum(sums, 1e-300))).sum(axis=1))


def _command(quantity: Quantity, devices: int, per_host: int, precision: str, *, on_gpus: bool) -> str:
    """A command or a note that says how the measurement is made."""
    dtype, before = _DTYPES.get(precision, ("", ""))
    product = _GEMM.format(dtype=dtype, before=before) if dtype else f"time products of 8192 x 8192 matrices in {precision}"
    all_reduce = f"mpirun -np {devices} -N {min(per_host, devices)} all_reduce_perf -b 1G -e 1G -g 1   # column busbw"
    memory = "nvidia-smi --query-gpu=memory.used --format=csv   # while the job runs; the largest"
    if not on_gpus:
        memory = "grep VmHWM /proc/PID/status   # at the job's end, less what it was before the model was made"
        product = _GEMM_ON_CORE.format(dtype=dtype or "float32")
        all_reduce = _ALL_REDUCE_ON_CORES.format(hosts=max(devices // per_host, 1), per_host=min(per_host, devices))
    return {
        Quantity.STEP: "time 20 steps after the first 10, and divide",
        Quantity.MEDIAN_STEP: "the median of the same steps' times, each taken alone",
        Quantity.MEMORY: memory,
        Quantity.UTILISATION: "nvidia-smi --query-gpu=utilization.gpu --format=csv -l 1   # for 20 s while the job runs; the mean",
        Quantity.POWER: "nvidia-smi --query-gpu=power.draw --format=csv -l 1   # for 20 s while the job runs; the mean",
        Quantity.GEMM: product,
        Quantity.ALL_REDUCE: all_reduce,
        Quantity.ONE_HOST: f"torchrun --nnodes 1 --nproc-per-node {per_host} ...   # 1/{devices // per_host} of the global batch",
    }[quantity]
