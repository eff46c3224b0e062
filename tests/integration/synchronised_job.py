"""One worker of a small job: ``synchronised_job.py SCHEME JOB STEPS STEP_S [--no-loss]``; prints a line of JSON for each event."""

from __future__ import annotations

import json
import sys

import torch

from dpro_search.deploy.synchronisation import synchronise
from dpro_search.errors import DproSearchError
from dpro_search.space.synchronisation import Pace


def main() -> None:
    scheme, job, steps, step_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
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
        if "--no-loss" in sys.argv:
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


if __name__ == "__main__":
    try:
        main()
    except DproSearchError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
