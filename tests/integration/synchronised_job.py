"""One worker of a small job: ``synchronised_job.py SCHEME JOB STEPS STEP_S [--no-loss]``; prints a line of JSON for each event.

``synchronised_job.py --serve`` starts workers that stdin names, a line of JSON each, by forking: PyTorch is imported once.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from dpro_search.errors import DproSearchError
from dpro_search.runtime.schemes import Pace
from dpro_search.runtime.synchronisation import synchronise


def train(arguments: list[str]) -> None:
    scheme, job, steps, step_s = arguments[0], arguments[1], int(arguments[2]), float(arguments[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(256, 6)
    labels = inputs @ torch.arange(6.0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = synchronise(model, optimizer, scheme, job=job, pace=Pace(step_s=step_s), silent_s=2.0)
    say(event="joined")
    for step in range(steps):
        rows = torch.randint(256, (32,))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[rows]).squeeze(1), labels[rows])
        loss.backward()
        if "--no-loss" in arguments:
            sync.step()
        else:
            sync.step(loss)
        if step == 4:
            say(event="training")
        if not sync.running:
            break
    with torch.no_grad():
        final = float(torch.nn.functional.mse_loss(model(inputs).squeeze(1), labels))
    say(event="done", loss=final, parameters=[p.reshape(-1).tolist() for p in model.parameters()], **sync.facts())
    sync.close()


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def run(arguments: list[str]) -> int:
    try:
        train(arguments)
    except DproSearchError as error:
        say(event="failed", error=str(error))
        return error.exit_code
    return 0


def serve() -> None:
    """Fork a worker for each line: its arguments, variables and output file; answer with the process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        worker = json.loads(line)
        process = os.fork()
        if process:
            print(process, flush=True)
            continue
        os.environ.update(worker["environment"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(worker["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            say(event="ended", code=run(worker["arguments"]))
        finally:
            os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(run(sys.argv[1:]))
