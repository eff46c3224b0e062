"""Per-message and server logs of BytePS: when each message left and arrived, and what each server's thread did.

A message log begins with ``role=worker, id=9`` and has a line ``time is_start is_push is_request key sender receiver`` whenever its
process sends (is_start) or has received a message. A server log has lines ``time: start|end, key, OPERATION, thread``; the
operations are COPY_FIRST (the first worker's part), SUM (every other's) and COPY_MERGED (the sum is ready). Times are epoch
microseconds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dpro_search.collect.readers._bytes import read_available
from dpro_search.collect.readers._salvage import cut_off, damaged

_HEADER = re.compile(rb"role=(\w+), id=(\d{1,9})\s")
_MESSAGE = re.compile(rb"(\d{1,17}) (True|False) (True|False) (True|False) (\d{1,18}) (\d{1,9}) (\d{1,9})")
_SERVER_OP = re.compile(rb"(\d{1,17}): (start|end), (\d{1,18}), (\w+), (\d{1,9})")


class MessageLane(NamedTuple):
    """Messages of one kind between two processes; they arrive in the order in which they were sent."""

    is_push: bool
    is_request: bool
    key: int
    sender: int
    receiver: int


@dataclass(frozen=True, kw_only=True)
class MessageLog:
    """The log of one process: `sent` and `received` instants of each lane, in order, epoch microseconds."""

    role: str
    node: int
    sent: dict[MessageLane, list[int]] = field(default_factory=lambda: defaultdict(list))
    received: dict[MessageLane, list[int]] = field(default_factory=lambda: defaultdict(list))


class ServerOp(NamedTuple):
    """One operation of a server's thread; epoch microseconds."""

    start_us: int
    end_us: int
    key: int
    operation: str
    thread: int


def is_message_log(head: bytes) -> bool:
    """Whether a file that begins with `head` is a message log."""
    return _HEADER.match(head) is not None


def is_server_log(head: bytes) -> bool:
    """Whether a file that begins with `head` is a server's log."""
    return _SERVER_OP.match(head) is not None


def read_message_log(path: Path, dropped: Counter[str]) -> MessageLog | None:
    """The messages of one process; lines that are none are counted. None if the first line is damaged."""
    data, damage = read_available(path)
    dropped[cut_off(path)] += bool(damage)
    header = _HEADER.match(data)
    if header is None:
        return None
    log = MessageLog(role=header[1].decode("ascii", "replace"), node=int(header[2]))
    for line in data[header.end() :].splitlines():
        match = _MESSAGE.fullmatch(line.strip())
        if match is None:
            dropped[damaged(path)] += bool(line.strip())
            continue
        time_us, is_start, is_push, is_request, key, sender, receiver = match.groups()
        lane = MessageLane(is_push == b"True", is_request == b"True", int(key), int(sender), int(receiver))
        (log.sent if is_start == b"True" else log.received)[lane].append(int(time_us))
    return log


def read_server_log(path: Path, dropped: Counter[str]) -> list[ServerOp]:
    """The operations of one server, by start; what does not pair up is counted."""
    data, damage = read_available(path)
    dropped[cut_off(path)] += bool(damage)
    since: dict[tuple[bytes, ...], int] = {}
    ops = []
    for line in data.splitlines():
        match = _SERVER_OP.fullmatch(line.strip())
        if match is None:
            dropped[damaged(path)] += bool(line.strip())
            continue
        time_us, edge, *what = match.groups()
        if edge == b"start":
            dropped["server log: start without end"] += tuple(what) in since
            since[tuple(what)] = int(time_us)
        else:
            start_us = since.pop(tuple(what), None)
            if start_us is None or int(time_us) < start_us:
                dropped["server log: end without start"] += 1
            else:
                key, operation, thread = what
                ops.append(ServerOp(start_us, int(time_us), int(key), operation.decode("ascii", "replace"), int(thread)))
    dropped["server log: start without end"] += len(since)
    return sorted(ops)


def wire_times(lane: MessageLane, sender: MessageLog, receiver: MessageLog) -> list[tuple[int, int]]:
    """(sent, received) of the messages of a lane that both ends logged, on each end's own clock."""
    return list(zip(sender.sent.get(lane, ()), receiver.received.get(lane, ()), strict=False))


def rounds_of(ops: Sequence[ServerOp]) -> list[list[int]]:
    """Indices of the operations of each aggregation: from COPY_FIRST to COPY_MERGED of one key."""
    open_rounds: dict[int, list[int]] = {}
    rounds = []
    for i, op in enumerate(ops):
        if op.operation == "COPY_FIRST" or op.key not in open_rounds:
            open_rounds[op.key] = []
            rounds.append(open_rounds[op.key])
        open_rounds[op.key].append(i)
    return rounds
