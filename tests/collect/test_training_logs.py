"""Logs of training programs: step times without the warm-up, memory and batch, also where the log was damaged on its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.training_logs import TrainingLog, read_training_log
from dpro_search.errors import InputError

MEGATRON = (
    " [2025-04-13 23:41:12] iteration {step:8d}/    1000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): "
    "{ms:.1f} | learning rate: 1.000000E-05 | global batch size:    16 | lm loss: 7.399415E+00 | loss scale: 1.0 | "
    "grad norm: 2.918 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
MEGATRON_MEMORY = (
    "[Rank 0] (after 10 iterations) memory (MB) | allocated: 21343.85 | max allocated: 60123.5 | reserved: 70000.0 | "
    "max reserved: 72704.0"
)
NEMO = (
    "Training epoch 0, iteration {step}/249 | lr: 1.961e-06 | global_batch_size: 8 | global_step: {step} | "
    "reduced_train_loss: 1.315 | train_step_timing in s: {seconds:.3f}"
)
MAXTEXT = "completed step: {step}, seconds: {seconds:.3f}, TFLOP/s/device: 167.154, Tokens/s/device: 3464.384, loss: 10.187"
TITAN = (
    "[rank{rank}]:\x1b[0m[titan] 2025-12-13 06:45:34,345 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  5.98660  "
    "\x1b[38;2;180;60;0mgrad_norm:  0.5402  \x1b[38;2;54;234;195mmemory: 63.36GiB(45.35%)  \x1b[34mtps: {tps:,}  "
    "\x1b[36mtflops: 23.15  \x1b[35mmfu: 2.34%\x1b[39m"
)
DEEPSPEED = (
    "[2023-11-07 01:55:23,711] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=4, lr=[4.9e-05], mom=[(0.9, 0.95)]\n"
    "[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step={micro}/global_step={step}, "
    "RunningAvgSamplesPerSec=25.025771473496132, CurrSamplesPerSec={rate}, MemAllocated=4.32GB, MaxMemAllocated=38.49GB"
)
BAR = "\r{percent:3d}%|##         | {step}/200 [{minutes:02d}:{rest:02d}<15:50,  {seconds:.2f}s/it]"


def read(path: Path, lines: Sequence[str] | str) -> TrainingLog:
    path.write_text(lines if isinstance(lines, str) else "\n".join(lines) + "\n")
    return read_training_log(path)


def megatron(times_ms: Sequence[float], every: int = 10) -> Iterator[str]:
    for number, ms in enumerate(times_ms, 1):
        yield MEGATRON.format(step=every * number, samples=160 * number, ms=ms)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


def test_megatron(log):
    lines = [*megatron([9147.6, 1150.0, 1100.0, 1200.0]), MEGATRON_MEMORY, "time (ms) | forward-compute: 53.79"]
    trained = read(log, lines)
    assert trained.program == "Megatron-LM"
    assert trained.times.tolist() == [1.15, 1.1, 1.2]
    assert (trained.left_out, trained.starts) == (1, 1)
    assert (trained.memory_bytes, trained.global_batch) == (72704 * 2**20, 16)


@pytest.mark.parametrize(
    "line",
    [
        NEMO,
        "Epoch 0: : 100%|##| {step}/100 [10:48<00:00, reduced_train_loss=0.0172, global_step={step}.00, "
        "consumed_samples=25600.0, train_step_timing in s={seconds:.3f}]",
        'DLLL {{"type": "LOG", "step": {step}, "data": {{"reduced_train_loss": 10.9, "lr": 1.2e-06, "global_step": {step}.0, '
        '"train_step_timing in s": {seconds}, "epoch": 0}}}}',
    ],
    ids=["lines", "bar", "json"],
)
def test_nemo_in_its_three_forms(log, line):
    trained = read(
        log, [line.format(step=step, seconds=seconds) for step, seconds in enumerate([7.126, 2.505, 1.505, 1.5, 1.51, 1.5])]
    )
    assert trained.program == "NeMo"
    assert trained.times.tolist() == [1.505, 1.5, 1.51, 1.5]
    assert trained.left_out == 2


def test_maxtext(log):
    times = [36.35, 176.734, 3.053, 3.0, 3.1]
    trained = read(log, [MAXTEXT.format(step=step, seconds=seconds) for step, seconds in enumerate(times)])
    assert (trained.program, trained.times.tolist(), trained.left_out) == ("MaxText", [3.053, 3.0, 3.1], 2)


def test_torchtitan_in_colour_counts_tokens_of_a_device(log):
    trained = read(log, [TITAN.format(rank=0, step=step, tps=tps) for step, tps in enumerate([512, 8000, 8100, 7900], 1)])
    assert (trained.program, trained.unit, trained.left_out) == ("torchtitan", "tokens a second and device", 1)
    assert trained.memory_bytes == round(63.36 * 2**30)
    assert trained.steps_us(16384.0, None) == pytest.approx([16384 / tps * 1e6 for tps in (8000, 8100, 7900)])
    with pytest.raises(InputError, match="give --step-time"):
        trained.steps_us(None, 8.0)


def test_validation_steps_of_torchtitan_are_no_training_steps(log):
    lines = [TITAN.format(rank=0, step=step, tps=8000) for step in range(1, 6)]
    validation = "[titan] 2025-12-13 06:45:34,345 - root - INFO - validate step:  3  loss:  1.0  memory: 9.00GiB(9%)  tps: 90,000"
    assert read(log, [*lines[:3], validation, *lines[3:]]).times.tolist() == [1 / 8000] * 4


def test_deepspeed_counts_samples_of_the_job(log):
    lines = [DEEPSPEED.format(step=10 * n, micro=40 * n, rate=rate) for n, rate in enumerate([2.5, 25.6, 25.7, 25.5], 1)]
    trained = read(log, lines)
    assert (trained.program, trained.left_out, trained.memory_bytes) == ("DeepSpeed", 1, round(38.49 * 2**30))
    assert trained.steps_us(None, 256.0) == pytest.approx([1e7, 256 / 25.7 * 1e6, 256 / 25.5 * 1e6])


def test_pipelines_of_deepspeed_print_seconds(log):
    trained = read(
        log,
        [f"steps: {n} loss: 5.5508 iter time (s): {s} samples/sec: 136.7" for n, s in ((1, 9.0), (2, 0.94), (3, 0.936), (4, 0.93))],
    )
    assert (trained.program, trained.times.tolist()) == ("DeepSpeed", [0.94, 0.936, 0.93])


def test_the_bar_of_the_hf_trainer_and_not_those_of_its_evaluation(log):
    bars = "".join(
        BAR.format(
            percent=step // 2, step=step, minutes=step // 12, rest=step * 5 % 60, seconds=12.0 if step == 1 else 5.0 + step / 100
        )
        for step in range(1, 8)
    )
    evaluation = "\r 50%|#####     | 1/2 [00:01<00:01,  1.00s/it]"
    trained = read(log, "Map: 100%|##| 9/9 [00:01<00:00, 9.1 examples/s]\n" + bars + evaluation + "\n")
    assert trained.program == "HF Trainer"
    assert trained.times.tolist() == [5.02, 5.03, 5.04, 5.05, 5.06, 5.07]


def test_fast_steps_of_a_bar_are_a_rate(log):
    bars = [f"  5%|5         | {step}/200 [00:02<00:50,  4.00it/s]" for step in range(1, 6)]
    assert read(log, bars).times.tolist() == [0.25] * 4


def test_without_a_bar_the_hf_trainer_has_one_mean(log):
    line = "{'train_runtime': 44.055, 'train_samples_per_second': 435.819, 'train_steps_per_second': 6.25, 'train_loss': 0.38}"
    trained = read(log, [line])
    assert trained.is_mean
    assert trained.times.tolist() == [0.16]


def test_ranks_that_are_interleaved(log):
    lines = [TITAN.format(rank=rank, step=step, tps=8000 + rank) for step in range(1, 6) for rank in (0, 3, 1)]
    lines[3], lines[5] = lines[5], lines[3]
    trained = read(log, lines)
    assert sorted(trained.times.tolist()) == sorted([1 / 8000, 1 / 8003, 1 / 8001] * 4)
    assert (trained.left_out, trained.starts) == (3, 1)


@pytest.mark.parametrize("label", ["{}: ", "[default{}]:", "[1,{}]<stdout>:"])
def test_labels_of_launchers(log, label):
    lines = [label.format(rank) + MAXTEXT.format(step=step, seconds=2.0) for step in range(6) for rank in (0, 1)]
    trained = read(log, lines)
    assert (len(trained.times), trained.starts) == (10, 1)


def test_ranks_without_labels_are_no_restarts(log):
    steps = [0, 0, 1, 1, 2, 1, 2, 3, 3, 2, 3]
    assert read(log, [MAXTEXT.format(step=step, seconds=2.0 + number / 100) for number, step in enumerate(steps)]).starts == 1


def test_each_start_of_a_restarted_training_warms_up(log):
    first = [
        MEGATRON.format(step=step, samples=16, ms=ms)
        for step, ms in ((10, 9000.0), (20, 1000.0), (30, 1010.0), (40, 990.0), (50, 1000.0))
    ]
    second = [
        MEGATRON.format(step=step, samples=16, ms=ms)
        for step, ms in ((20, 8000.0), (30, 3000.0), (40, 1005.0), (50, 1000.0), (60, 995.0))
    ]
    trained = read(log, [*first, "Traceback (most recent call last):", *second])
    assert trained.starts == 2
    assert trained.left_out == 3
    assert max(trained.times) < 1.02


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_that_a_terminal_wrapped(log, width):
    plain = [*megatron([9147.6, 1150.0, 1100.0, 1200.0])]
    wrapped = [line[start : start + width] for line in plain for start in range(0, len(line), width)]
    assert read(log, wrapped).times.tolist() == [1.15, 1.1, 1.2]


def test_a_stall_is_kept_and_does_not_move_the_median(log):
    trained = read(log, [*megatron([900.0, 100.0, 101.0, 99.0, 5000.0, 100.0, 100.0])])
    assert 5.0 in trained.times
    assert np.median(trained.times) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "epoch 1 loss 0.5\nepoch 2 loss 0.4\n",
            "no step times in it; logs of Megatron-LM, NeMo, MaxText, torchtitan, DeepSpeed and",
        ),
        ("", "no step times in it"),
        (
            MAXTEXT.format(step=0, seconds=30.0) + "\n" + MAXTEXT.format(step=1, seconds=3.0),
            "1 step times of MaxText after the warm-up",
        ),
        (MAXTEXT.format(step=0, seconds=0.0) + "\n", "no step times in it"),
    ],
)
def test_a_log_that_tells_nothing_is_one_line(log, text, message):
    with pytest.raises(InputError, match=message) as error:
        read(log, text)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_one_line(tmp_path):
    for path in (tmp_path / "none.log", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_training_log(path)


def test_the_hour_of_a_time_stamp_is_no_rank(log):
    lines = [f"{hour}:00:01 INFO {MAXTEXT.format(step=hour, seconds=2.0)}" for hour in range(10, 20)]
    trained = read(log, lines)
    assert (trained.starts, trained.left_out) == (1, 1)
