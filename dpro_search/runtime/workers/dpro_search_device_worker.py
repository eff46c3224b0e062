"""Times library ops on this machine's GPU or, without one, on one core of its CPU.

    python dpro_search_device_worker.py

Speaks lines of JSON on its standard streams: reports that it is "ready", with what it runs on; then reads an op a line, and answers
its times in us or why there are none. An empty line ends it. PyTorch and the standard library only.

On a GPU, calls of an op are captured into a CUDA graph, so that no launch is between them; where that fails, they are launched one
after the other. On a CPU the thread's own time counts, which other processes do not lengthen.
"""

import json
import math
import os
import statistics
import sys
import time

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DRAWS = torch.Generator(DEVICE)  # of inputs: the default one draws no more once a capture of a CUDA graph has failed
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
# A round is at least so long, s, of at least one call and at most MOST.
ROUNDS, ROUND_S, MOST = 7, 0.01 if CUDA else 0.02, 200


def gemm(size, dtype, backward):
    """Functions to time: a product of batch x m x k with k x n matrices; backward, those of both gradients."""
    batch, m, n, k = size["batch"], size["m"], size["n"], size["k"]
    lead = (batch,) if batch > 1 else ()
    if backward:
        x, w, g = _random((*lead, m, k), dtype), _random((*lead, k, n), dtype), _random((*lead, m, n), dtype)
        return [lambda: torch.matmul(g, w.transpose(-1, -2)), lambda: torch.matmul(x.transpose(-1, -2), g)]
    right, left = size["transposes"] & 1, size["transposes"] & 2
    x = _random((*lead, k, m) if left else (*lead, m, k), dtype)
    w = _random((*lead, n, k) if right else (*lead, k, n), dtype)
    x, w = x.transpose(-1, -2) if left else x, w.transpose(-1, -2) if right else w
    return [lambda: torch.matmul(x, w)]


def convolution(size, dtype, backward):
    """A square convolution; backward, the gradients of its image and of its filter."""
    x = _random((size["images"], size["inputs"], size["side"], size["side"]), dtype)
    w = _random((size["outputs"], size["inputs"], size["window"], size["window"]), dtype)
    stride, padding = [size["stride"]] * 2, [size["padding"]] * 2
    made = torch.nn.functional.conv2d(x, w, None, stride, padding)
    if not backward:
        return [lambda: torch.nn.functional.conv2d(x, w, None, stride, padding)]
    g = _random(made.shape, dtype)
    call = torch.ops.aten.convolution_backward
    return [lambda: call(g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, [True, True, False])]


def attention(size, dtype, backward):
    """Fused attention; backward, its gradients, which need the forward pass's autograd graph."""
    many = size["heads"] // max(size["kv_heads"], 1)
    shapes = [(size["batch"], size["heads"], size["queries"], size["head_dim"])] + [
        (size["batch"], size["kv_heads"], size["keys"], size["head_dim"])
    ] * 2
    q, k, v = (_random(shape, dtype).requires_grad_(backward) for shape in shapes)
    options = {"enable_gqa": True} if many > 1 else {}

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(size["causal"]), **options)

    if not backward:
        return [forward]
    made = forward()
    g = _random(made.shape, dtype)
    return [lambda: torch.autograd.grad(made, (q, k, v), g, retain_graph=True)]


def streamed(name, size, dtype, backward):
    """An op that memory bounds, on rows of a length."""
    x, y = (_random((size["rows"], size["length"]), dtype) for _ in range(2))
    out = torch.empty_like(x)
    weight, bias = (_random((size["length"],), dtype) for _ in range(2))
    aten, shape = torch.ops.aten, (size["length"],)
    if name == "layer_norm":
        if not backward:
            return [lambda: torch.nn.functional.layer_norm(x, shape, weight, bias)]
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        return [lambda: aten.native_layer_norm_backward(y, x, shape, mean, rstd, weight, bias, [True, True, True])]
    if name == "softmax":
        if not backward:
            return [lambda: torch.softmax(x, -1)]
        made = torch.softmax(x, -1)
        return [lambda: aten._softmax_backward_data(y, made, -1, dtype)]
    if name == "embedding":
        table = _random((min(size["rows"], 32768), size["length"]), dtype)
        places = torch.randint(0, table.shape[0], (size["rows"],), device=DEVICE, generator=DRAWS)
        if not backward:
            return [lambda: torch.nn.functional.embedding(places, table)]
        return [lambda: aten.embedding_dense_backward(y, places, table.shape[0], -1, False)]
    if not backward:
        positive = x.abs_() if name.startswith("pow") else x
        calls = {
            "add": lambda: torch.add(x, y, out=out),
            "add_scalar": lambda: torch.add(x, 1.5, out=out),
            "mul": lambda: torch.mul(x, y, out=out),
            "mul_scalar": lambda: torch.mul(x, 1.5, out=out),
            "div": lambda: torch.div(x, y, out=out),
            "div_scalar": lambda: torch.div(x, 1.5, out=out),
            "pow": lambda: torch.pow(positive, y, out=out),
            "pow_scalar": lambda: torch.pow(positive, 1.7, out=out),
            "copy": lambda: out.copy_(x),
            "relu": lambda: torch.relu(x),
            "tanh": lambda: torch.tanh(x, out=out),
            "gelu": lambda: torch.nn.functional.gelu(x),
        }
        return [calls[name]]
    backwards = {
        "relu": [lambda: aten.threshold_backward(y, x, 0)],
        "tanh": [lambda: aten.tanh_backward(y, x)],
        "gelu": [lambda: aten.gelu_backward(y, x)],
    }
    if name not in backwards:
        raise NotImplementedError("no backward pass of %s is timed" % name)
    return backwards[name]


def _random(shape, dtype):
    return torch.randn(shape, device=DEVICE, dtype=torch.float32, generator=DRAWS).to(dtype)


def measure(spec):
    """Times of a call in each round, us."""
    dtype, size = DTYPES[spec["precision"]], spec["sizes"]
    makers = {"gemm": gemm, "convolution": convolution, "attention": attention}
    maker = makers.get(spec["name"])
    calls = maker(size, dtype, spec["backward"]) if maker else streamed(spec["name"], size, dtype, spec["backward"])
    # Only attention's backward pass is autograd's.
    with torch.set_grad_enabled(spec["name"] == "attention" and spec["backward"]):
        return _cuda_rounds(calls) if CUDA else _cpu_rounds(calls)


def _run(calls, times):
    for _ in range(times):
        for call in calls:
            call()


def _cpu_rounds(calls):
    """Thread time of a call, us, in each round."""
    _run(calls, 2)
    began = time.thread_time_ns()
    _run(calls, 1)
    once_s = max((time.thread_time_ns() - began) / 1e9, 1e-7)
    times = int(min(max(math.ceil(ROUND_S / once_s), 1), MOST))
    rounds_us = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        _run(calls, times)
        rounds_us.append((time.thread_time_ns() - began) / 1e3 / times)
    return rounds_us, "called"


def _cuda_rounds(calls):
    """Time on the device of a call, us, in each round."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # inputs are drawn on another stream
    with torch.cuda.stream(stream):
        _run(calls, 3)
        once_s = max(_events_us(lambda: _run(calls, 3)) / 3e6, 1e-7)
        times = int(min(max(math.ceil(ROUND_S / once_s), 1), MOST))
        how, run = "captured", None
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                _run(calls, times)
            run = graph.replay
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            torch.cuda.synchronize()
            how = "called"

            def run():
                _run(calls, times)

        run()
        return [_events_us(run) / times for _ in range(ROUNDS)], how


def _events_us(run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def described():
    """The device that ops run on."""
    if not CUDA:
        return {"gpu": None}
    device = torch.cuda.get_device_properties(0)
    clock, wires = getattr(device, "memory_clock_rate", None), getattr(device, "memory_bus_width", None)
    core = getattr(device, "clock_rate", None)
    return {
        "gpu": device.name,
        "amd": bool(torch.version.hip),
        "memory_bytes": device.total_memory,
        "cores": device.multi_processor_count,
        "l2_bytes": getattr(device, "L2_cache_size", None),
        "clock_hz": core * 1e3 if core else None,
        "memory_bytes_per_s": 2 * clock * 1e3 * wires / 8 if clock and wires else None,
    }


def main():
    # What libraries print must not mix with the protocol.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if not CUDA:
        torch.set_num_threads(1)
    # As frameworks and users have it by default; single precision is not TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)

    def say(**what):
        out.write(json.dumps(what) + "\n")

    say(ready=described(), versions={"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip})
    for line in sys.stdin:
        if not line.strip():
            return
        try:
            rounds, how = measure(json.loads(line))
            quarters = statistics.quantiles(rounds, n=4)
            middle = statistics.median(rounds)
            say(us=middle, spread_pct=(quarters[2] - quarters[0]) / 2 / middle * 100, how=how)
        except Exception as error:
            lines = str(error).strip().splitlines()
            short = lines[0][:200] if lines else ""
            memory = isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)
            ends = not _lives()
            say(failed="out of memory" if memory else "%s: %s" % (type(error).__name__, short), ends=ends)
            if ends:
                return
        if CUDA:
            torch.cuda.empty_cache()


def _lives():
    """Whether the GPU takes further work of this process: not after a kernel that failed."""
    try:
        if CUDA:
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main()
