"""One worker of a small classifier of handwritten digits, as users would write it; the third of three is half as fast."""

from __future__ import annotations

import os

import numpy as np
import torch
from sklearn.datasets import load_digits

from dpro_search.runtime.schemes import Pace
from dpro_search.runtime.synchronisation import synchronise

torch.set_num_threads(1)
seed, worker = int(os.environ.get("DPRO_SEARCH_SEED", "0")), int(os.environ["RANK"])
torch.manual_seed(seed)
draws = np.random.default_rng((seed, worker))
digits = load_digits()
inputs, labels = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
sync = synchronise(model, optimizer, pace=Pace(step_s=0.02 if worker == 2 else 0.01, commit_s=0.004))
while sync.running:
    rows = torch.from_numpy(draws.integers(len(inputs), size=16))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
    loss.backward()
    sync.step(loss)
sync.close()
