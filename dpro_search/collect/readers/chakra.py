"""MLCommons Chakra execution traces: one file a rank, a graph of nodes with lengths, dependencies and sizes of collectives.

A file is a sequence of messages, each after its length as a varint: the metadata, then the nodes. Starts may be recorded or not;
where they are not, each node is laid out as early as its data dependencies and the order on its thread or stream allow. (A control
dependency names the call around a node; calls are split into parts of which the last keeps the name, so it gives little information
on when.)
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from dpro_search.collect.assemble.described import described
from dpro_search.collect.readers._bytes import read_available
from dpro_search.collect.readers._salvage import cut_off, damaged
from dpro_search.collect.readers._wire import Frames, varint
from dpro_search.collect.readers.event_table import EventTable, clocks_as_recorded
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.readers.protos import MESSAGES, text
from dpro_search.collect.recorded_names import collective_kind_of
from dpro_search.collect.trace import CollectiveKind, DependencyKind, EventKind, ProcessGroup, Trace
from dpro_search.errors import TraceFormatError

FORMAT = "chakra"

_SEND, _RECEIVE, _COLLECTIVE = 5, 6, 7  # types of nodes (et_def.proto)
_COMM_TYPES = {  # by `comm_type` (et_def.proto, CollectiveCommType)
    0: CollectiveKind.ALL_REDUCE,
    1: CollectiveKind.REDUCE,
    2: CollectiveKind.ALL_GATHER,
    3: CollectiveKind.GATHER,
    4: CollectiveKind.SCATTER,
    5: CollectiveKind.BROADCAST,
    6: CollectiveKind.ALL_TO_ALL,
    7: CollectiveKind.REDUCE_SCATTER,
    8: CollectiveKind.REDUCE_SCATTER,  # in equal blocks
    9: CollectiveKind.BARRIER,
}
_RANK = re.compile(r"\.(\d{1,6})\.et(?:\.gz)?$")
_IDENTITY = re.compile(rb"\x08[\x80-\xff]{0,9}[\x00-\x7f]\x12")  # the number, and the beginning of the name
_FIRST = b"\x08\x12"  # bytes with which a node begins: the field of its number or of its name
_LONGEST_US = 1e15
_VALUES = ("double_val", "int32_val", "int64_val", "uint32_val", "uint64_val", "bool_val", "string_val")


@dataclass(kw_only=True)
class _ChakraNode:
    id: int
    name: str
    type: int
    attributes: dict[str, Any]
    data_deps: list[int]
    ctrl_deps: list[int]
    start_us: float
    length_us: float

    @property
    def on_host(self) -> bool:
        return bool(self.attributes.get("is_cpu_op", False))

    @property
    def communicates(self) -> bool:
        return self.type in (_SEND, _RECEIVE, _COLLECTIVE) and not self.on_host

    @property
    def stream(self) -> int:
        thread = self.attributes.get("tid", 0 if self.on_host else self.type == _COLLECTIVE)
        return thread if isinstance(thread, int) and 0 <= thread < 2**31 else 0

    @property
    def collective_kind(self) -> CollectiveKind:
        if not self.communicates:
            return CollectiveKind.UNKNOWN
        if self.type != _COLLECTIVE:
            return CollectiveKind.SEND if self.type == _SEND else CollectiveKind.RECV
        number = self.attributes.get("comm_type")
        reported = _COMM_TYPES.get(number) if isinstance(number, int) else None
        return collective_kind_of(self.name) if reported is None else reported

    @property
    def group(self) -> str:
        """Name of the process group; empty where it is not recorded."""
        name = self.attributes.get("pg_name")
        return str(name) if self.communicates and isinstance(name, str | int) else ""

    @property
    def size_bytes(self) -> int:
        size = self.attributes.get("comm_size", 0)
        return size if isinstance(size, int) and 0 <= size < 2**50 else 0


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` holds metadata of Chakra and then a node."""
    length_of_metadata = varint(head, 0)
    if length_of_metadata is None or not 0 < length_of_metadata[0] <= len(head) - length_of_metadata[1]:
        return False
    end = sum(length_of_metadata)
    place = length_of_metadata[1]
    while place < end:  # only the fields 1 and 2, which fill the message exactly
        length = varint(head, place + 1) if head[place] in (0x0A, 0x12) else None
        if length is None:
            return False
        place = length[1] + length[0]
    node = varint(head, end)
    return place == end and node is not None and node[1] < len(head) and head[node[1]] in _FIRST


def read(paths: Sequence[Path]) -> Trace:
    """Read the traces of the ranks of one job.

    A file is of the rank in its name ("x.3.et"); where names have no number, of its place in the order of the paths. Nodes that ran
    on the host are OP events, others KERNEL, COPY or COLLECTIVE; a data dependency is a DATA one, the call that launched what ran
    on a device a LAUNCH. Collectives of equal kind, group and size are matched across ranks in order. The whole recording is one
    step.

    Raises
    ------
    InputError
        A file cannot be read.
    TraceFormatError
        A file holds no node.
    """
    dropped: Counter[str] = Counter()
    order = _ranks(paths)
    ranks = [_nodes(path, dropped) for path in order]
    recorded = any(node.start_us > 0 for nodes in ranks for node in nodes)
    if not recorded:
        ranks = [_laid_out(nodes, dropped) for nodes in ranks]
    for path, nodes in zip(order, ranks, strict=True):
        if not nodes:
            raise TraceFormatError(f"{path}: no usable node in it; expected an execution trace of MLCommons Chakra")
    base_us = min(node.start_us for nodes in ranks for node in nodes)
    numbers = _collectives(ranks)
    named = sorted({node.group for nodes in ranks for node in nodes if node.group})
    groups = {name: number for number, name in enumerate(named)}
    table = EventTable()
    for rank, nodes in enumerate(ranks):
        _add_rank(table, rank, nodes, base_us, numbers, groups, dropped)
    warnings = [] if recorded else ["starts are not in the files: nodes are laid out by their dependencies and lengths"]
    if len(ranks) == 1 and any(node.communicates for node in ranks[0]):
        warnings.append("one rank: its collectives have no peers, and hold their wait")
    clock = "the files have no information on their clocks" if recorded else "no clock: starts are laid out"
    return described(
        table.trace(
            format=FORMAT,
            framework="pytorch",
            comm="nccl" if any("nccl" in node.name.lower() for nodes in ranks for node in nodes) else "unknown",
            clock=clocks_as_recorded(len(ranks), clock),
            steps=(
                (r, 0, min(n.start_us for n in nodes) - base_us, max(n.start_us + n.length_us for n in nodes) - base_us)
                for r, nodes in enumerate(ranks)
            ),
            dropped=dropped,
            warnings=warnings,
            groups=(ProcessGroup(name=name) for name in named),
        )
    )


def _ranks(paths: Sequence[Path]) -> list[Path]:
    """The files in the order of the ranks."""
    named = {int(match[1]): path for path in paths if (match := _RANK.search(path.name))}
    return [named[rank] for rank in sorted(named)] if len(named) == len(paths) else list(paths)


def _nodes(path: Path, dropped: Counter[str]) -> list[_ChakraNode]:
    data, damage = read_available(path)
    head = varint(data, 0)
    frames = Frames(data[sum(head) if head else 0 :], _decoded, _FIRST, _IDENTITY)
    node_of_id: dict[int, _ChakraNode] = {}
    for node in frames:
        if node.id in node_of_id:
            dropped["nodes of one id"] += 1
        elif not (node.start_time_micros < _LONGEST_US and node.duration_micros < _LONGEST_US):
            dropped["out of range"] += 1
        else:
            node_of_id[node.id] = _ChakraNode(
                id=node.id,
                name=text(node.name),
                type=node.type,
                attributes={text(attribute.name): _value(attribute) for attribute in node.attr},
                data_deps=list(dict.fromkeys(node.data_deps)),
                ctrl_deps=list(dict.fromkeys(node.ctrl_deps)),
                start_us=float(node.start_time_micros),
                length_us=float(node.duration_micros),
            )
    dropped[cut_off(path)] += bool(damage) or frames.cut
    dropped[damaged(path)] += frames.lost
    return list(node_of_id.values())


def _decoded(data: bytes) -> Any:
    try:
        return MESSAGES["ChakraNode"].FromString(data)
    except DecodeError:
        return None


def _value(attribute: Any) -> Any:
    for name in _VALUES:
        if attribute.HasField(name):
            value = getattr(attribute, name)
            return text(value) if name == "string_val" else value
    return None


def _laid_out(nodes: Sequence[_ChakraNode], dropped: Counter[str]) -> list[_ChakraNode]:
    """The nodes with starts, in the order in which they become possible; of several at once the first in the file."""
    place = {node.id: i for i, node in enumerate(nodes)}
    needs = [{dep for dep in node.data_deps if dep in place and dep != node.id} for node in nodes]
    followers: dict[int, list[int]] = defaultdict(list)
    for i, of in enumerate(needs):
        for dep in of:
            followers[place[dep]].append(i)
    missing = [len(of) for of in needs]
    heap = [(0.0, i) for i, count in enumerate(missing) if count == 0]
    free_us: dict[tuple[bool, int], float] = defaultdict(float)
    done = []
    while heap:
        possible_us, i = heapq.heappop(heap)
        node = nodes[i]
        device = node.on_host, node.stream
        node.start_us = max(possible_us, free_us[device])
        free_us[device] = node.start_us + node.length_us
        done.append(node)
        for follower in followers[i]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(heap, (_possible_us(nodes[follower], nodes, place), follower))
    dropped["nodes in a cycle of dependencies"] += len(nodes) - len(done)
    return done


def _possible_us(node: _ChakraNode, nodes: Sequence[_ChakraNode], place: dict[int, int]) -> float:
    before = [nodes[place[dep]] for dep in node.data_deps if dep in place and dep != node.id]
    return max((other.start_us + other.length_us for other in before), default=0.0)


def _collectives(ranks: Sequence[Sequence[_ChakraNode]]) -> dict[tuple[int, int], int]:
    """Number of the collective or message of each (rank, node id) whose peers were found."""
    parts: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, nodes in enumerate(ranks):
        seen: Counter[tuple[Any, ...]] = Counter()
        for node in nodes:
            if not node.communicates:
                continue
            get = node.attributes.get
            key: tuple[Any, ...]
            if node.type == _COLLECTIVE:
                key = "collective", get("comm_type"), get("pg_name"), node.size_bytes
            else:
                ends = (rank, get("comm_dst")) if node.type == _SEND else (get("comm_src"), rank)
                key = "message", *ends, get("comm_tag"), node.size_bytes
            parts[(*key, seen[key])].append((rank, node.id))
            seen[key] += 1
    numbers: dict[tuple[int, int], int] = {}
    for number, (key, of) in enumerate(parts.items()):
        if len(of) > 1 and len(of) == (2 if key[0] == "message" else len(ranks)):
            numbers |= dict.fromkeys(of, number)
    return numbers


def _kind(node: _ChakraNode) -> EventKind:
    if node.communicates:
        return EventKind.COLLECTIVE
    if node.on_host:
        return EventKind.OP
    return EventKind.COPY if re.match(r"Mem(cpy|set)", node.name) else EventKind.KERNEL


def _add_rank(
    table: EventTable,
    rank: int,
    nodes: Sequence[_ChakraNode],
    base_us: float,
    numbers: dict[tuple[int, int], int],
    groups: dict[str, int],
    dropped: Counter[str],
) -> None:
    streams: dict[tuple[bool, int], int] = {}
    events: dict[int, int] = {}
    for node in sorted(nodes, key=lambda node: node.start_us):
        start_us = node.start_us - base_us
        events[node.id] = table.add(
            node.name,
            _kind(node),
            rank=rank,
            stream=streams.setdefault((node.on_host, node.stream), len(streams)),
            start_us=start_us,
            end_us=start_us + node.length_us,
            step=0,
            collective=numbers.get((rank, node.id), -1),
            size_bytes=node.size_bytes,
            collective_kind=node.collective_kind,
            group=groups.get(node.group, -1),
        )
    for node in nodes:
        target = events[node.id]
        launched_by = [] if node.on_host else node.ctrl_deps
        for kind, deps in ((DependencyKind.DATA, node.data_deps), (DependencyKind.LAUNCH, launched_by)):
            for dep in deps:
                source = events.get(dep)
                if source is None or source == target:
                    dropped["dependencies on nodes that are not there"] += 1
                    continue
                begins_us = table.end_us[source] if kind is DependencyKind.DATA else table.start_us[source]
                if begins_us <= table.start_us[target]:
                    table.need(source, target, kind)
                else:
                    dropped["dependencies that the times contradict"] += 1


IMPORTER = Importer(
    name=FORMAT,
    description="execution traces of MLCommons Chakra (protobuf messages after their lengths)",
    recognise=recognise,
    read=read,
)
