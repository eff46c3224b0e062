"""`WorkerGroup`: a process group of `torch.distributed` (Gloo) that is formed anew when a member is lost or comes.

The members agree through the job's key-value store (`MASTER_ADDR`, `MASTER_PORT`). Each group has a generation. Who finds that one
is over sets the next number; those that register for it within a time are its members, and the first of them writes the list.
The store belongs to what started the job (torchrun's agent); where rank 0 holds it, the job ends with rank 0.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dpro_search.errors import JobError

if TYPE_CHECKING:
    import torch

_START_S = 120.0  # the first group waits so long for all workers
_ANSWER_S = 0.02  # between looks at the store


class GroupChangedError(Exception):
    """A member was lost, or one wants to come: form the group anew."""


class WorkerGroup:
    """The processes that take part now.

    Attributes
    ----------
    members
        Their workers' numbers, in the order of ranks.
    """

    def __init__(self, worker: int, workers: int, *, job: str, silent_s: float) -> None:
        import torch.distributed as dist

        self.members: tuple[int, ...] = ()
        self._worker, self._workers, self._silent_s = worker, workers, silent_s
        self._generation = 0
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=worker == 0 and not agent,
                wait_for_workers=False,
                timeout=timedelta(seconds=_START_S),
            )
        except KeyError as error:
            raise JobError(f"synchronise: {error.args[0]} is not set; start the job with torchrun") from None
        self._store = dist.PrefixStore(f"dpro-search/{job}", store)

    def agreed(self, name: str, value: str) -> str:
        """The value that the first member of the job to call this has given for a name."""
        stored: bytes = self._store.compare_set(name, "", value)
        return stored.decode()

    def check(self) -> None:
        """Raise `GroupChangedError` if the next group is being formed."""
        if self._number() != self._generation:
            raise GroupChangedError

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all members; raises `GroupChangedError` where one does not answer."""
        import torch.distributed as dist

        summed = values.clone()
        try:
            dist.all_reduce(summed)
        except RuntimeError as error:
            raise GroupChangedError from error
        return summed

    def form(self, rounds: int, state: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Form the next group.

        Parameters
        ----------
        rounds, state
            How many rounds this member has ended, and the state after them.

        Returns
        -------
        The most rounds that a member has ended, and the state of such a one.
        """
        while True:
            self.leave()
            try:
                self._gather(self._next())
                return self._agreed(rounds, state)
            except (GroupChangedError, RuntimeError) as error:
                if "store" in str(error).lower() or "broken pipe" in str(error).lower():
                    raise JobError(f"synchronise: the store of the job has ended; start the job again ({error})") from error

    def leave(self) -> None:
        """End the process group of this member."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def close(self) -> None:
        """Leave, and tell the others to go on without this member."""
        with suppress(RuntimeError):  # the store has ended before
            self._store.add("gone", 1)
            self._advance(self._generation)
        self.leave()

    def _expected(self) -> int:
        """Number of workers that may still come."""
        return self._workers - int(self._store.add("gone", 0))

    def _number(self) -> int:
        return int(self._store.add("generation", 0))

    def _advance(self, generation: int) -> int:
        """Set the generation behind a given one, unless somebody has; the newest."""
        if self._store.add(f"after {generation}", 1) == 1:
            self._store.add("generation", 1)
        return self._number()

    def _next(self) -> int:
        """The generation to register for: behind that of this member, and one whose members are not yet listed."""
        number = self._number()
        if number == self._generation or self._store.check([f"{number} members"]):
            number = self._advance(number)
        return number

    def _gather(self, generation: int) -> None:
        """Register, and wait for the list of members."""
        arrival = int(self._store.add(f"{generation} count", 1))
        self._store.set(f"{generation} arrival {arrival}", str(self._worker))
        wait_s = _START_S if generation == 1 else self._silent_s
        begun = time.monotonic()
        if arrival == 1:
            while self._store.add(f"{generation} count", 0) < self._expected() and time.monotonic() - begun < wait_s:
                time.sleep(_ANSWER_S)
            count = int(self._store.add(f"{generation} count", 0))
            listed = [int(self._store.get(f"{generation} arrival {i + 1}")) for i in range(count)]
            self._store.set(f"{generation} members", json.dumps(listed))
        while not self._store.check([f"{generation} members"]):
            if time.monotonic() - begun > wait_s + self._silent_s:
                self._advance(generation)  # the first to arrive was lost
                raise GroupChangedError
            time.sleep(_ANSWER_S)
        self._generation = generation
        members = json.loads(self._store.get(f"{generation} members"))
        if self._worker not in members:
            raise GroupChangedError  # came too late for this one
        self.members = tuple(dict.fromkeys(members))

    def _agreed(self, rounds: int, state: torch.Tensor) -> tuple[int, Any]:
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group {self._generation}", self._store),
            rank=self.members.index(self._worker),
            world_size=len(self.members),
            timeout=timedelta(seconds=self._silent_s),
        )
        every = [torch.zeros(1, dtype=torch.int64) for _ in self.members]
        dist.all_gather(every, torch.tensor([rounds]))
        most = max(int(each) for each in every)
        source = next(rank for rank, each in enumerate(every) if int(each) == most)
        taken = state.clone()
        dist.broadcast(taken, source)
        return most, taken
