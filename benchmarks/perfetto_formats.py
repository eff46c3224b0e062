"""What a timeline for ui.perfetto.dev costs as JSON, which `--perfetto` writes, and as Perfetto's own protobuf.

    pip install perfetto==0.59.1
    python benchmarks/perfetto_formats.py --slices 1000000 json|protobuf

Slices of 8 tracks with 1,000 names and two numbers each; no arrows and counters. Protobuf has names once (interned), and a packet
for the beginning and one for the end of each slice, written 10,000 at a time.
"""

from __future__ import annotations

import argparse
import gzip
import resource
import time

import msgspec
import numpy as np

from dpro_search.replay.outputs.perfetto_events import Slice

NAMES = [f"layer{number}/backward/gradient" for number in range(1000)]
TRACKS, LENGTH_US, CHUNK = 8, 2.5, 10_000
SAMPLE_BYTES = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("format", choices=("json", "protobuf"))
    options = parser.parse_args()
    start_us = np.round(np.arange(options.slices) * 3.123, 3).tolist()
    began = time.process_time()
    data = {"json": as_json, "protobuf": as_protobuf}[options.format](start_us)
    seconds = time.process_time() - began
    some = data[:SAMPLE_BYTES]
    ratio = len(gzip.compress(some)) / len(some)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    sizes = f"{len(data) / 1e6:.0f} MB ({len(data) * ratio / 1e6:.0f} compressed)"
    print(f"{options.format}: {options.slices} slices in {seconds:.1f} s of CPU time, {sizes}, process {peak:.0f} MB")


def as_json(start_us: list[float]) -> bytes:
    slices = [
        Slice(NAMES[number % len(NAMES)], "BACKWARD", 1, number % TRACKS, start, LENGTH_US, args={"op": number, "iteration": 3})
        for number, start in enumerate(start_us)
    ]
    return msgspec.json.encode({"traceEvents": slices, "displayTimeUnit": "ms"})


def as_protobuf(start_us: list[float]) -> bytes:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent

    trace = Trace()
    first = trace.packet.add(trusted_packet_sequence_id=1, sequence_flags=TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
    for number, name in enumerate(NAMES):
        first.interned_data.event_names.add(iid=number + 1, name=name)
    for number, name in enumerate(("op", "iteration")):
        first.interned_data.debug_annotation_names.add(iid=number + 1, name=name)
    parts = []
    for number, start in enumerate(start_us):
        if number % CHUNK == 0:
            parts.append(trace.SerializeToString())
            trace = Trace()
        track = 1 + number % TRACKS
        begin = trace.packet.add(timestamp=int(start * 1000), trusted_packet_sequence_id=1, sequence_flags=2)
        event = begin.track_event
        event.type, event.track_uuid, event.name_iid = TrackEvent.TYPE_SLICE_BEGIN, track, 1 + number % len(NAMES)
        event.debug_annotations.add(name_iid=1, int_value=number)
        event.debug_annotations.add(name_iid=2, int_value=3)
        end = trace.packet.add(timestamp=int((start + LENGTH_US) * 1000), trusted_packet_sequence_id=1)
        end.track_event.type, end.track_event.track_uuid = TrackEvent.TYPE_SLICE_END, track
    parts.append(trace.SerializeToString())
    return b"".join(parts)


if __name__ == "__main__":
    main()
