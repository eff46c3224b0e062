"""Names of the calls of a device's runtime that wait, order streams or ask for events.

CUDA's names are the pattern for HIP, MUSA (Moore Threads) and most others. CNRT (Cambricon) calls a stream a queue and an event a
notifier; ACL (Ascend) puts the verb first; Unified Runtime, Level Zero and OpenCL have queues, command lists, fences and `Finish`.
"""

from __future__ import annotations

import re

# Vendors add these to the name of a call: `cudaStreamSynchronize_ptsz`, `aclrtSynchronizeStreamWithTimeout`.
_ENDING = r"(?:WithTimeout|WithFlags|WithBarrier|Ext)*(?:_\w+)?$"

# Calls in which the host waits for all streams of a device, for one stream, and for an event.
DEVICE_WAITS = re.compile(rf"(?:(?:Device|Ctx|Context)Sync(?:hronize)?|Sync(?:hronize)?(?:Device|Ctx|Context)){_ENDING}")
STREAM_WAITS = re.compile(
    rf"(?:(?:Stream|Queue|CommandList)(?:Host)?Sync(?:hronize)?|Sync(?:hronize)?(?:Stream|Queue)|QueueFinish|clFinish){_ENDING}"
)
EVENT_WAITS = re.compile(
    r"(?:(?:Event|Fence|Notifier)(?:Host)?Sync(?:hronize)?|Sync(?:hronize)?(?:Event|Notifier)"
    rf"|(?<!Queue)WaitNotifier|WaitForEvents|(?<!Enqueue)Events?Wait){_ENDING}"
)
# Calls that wait for the device before they copy or free memory.
MEMORY_WAITS = re.compile(r"^(?:cuda|hip|musa|aclrt|cnrt|mc)(?:Memcpy|Free)$")

# Calls that make a stream wait for an event, and that record one on a stream.
STREAM_ORDERS = re.compile(
    rf"(?:(?:Stream|Queue)Wait(?:Event|Notifier)|EnqueueEventsWait|AppendWaitOnEvents|AppendBarrier){_ENDING}"
)
EVENT_RECORDS = re.compile(rf"(?:EventRecord|RecordEvent|PlaceNotifier|AppendSignalEvent){_ENDING}")

# Calls that only ask whether something has ended: a host that polls makes many of them.
QUERIES = re.compile(
    rf"(?:(?:Event|Stream|Queue|Notifier|Fence)Query(?:Status)?|Query(?:Event|Stream|Notifier)(?:Status)?|EventGetInfo){_ENDING}"
)


def host_waits(name: str) -> bool:
    """Whether the host waits for the device in a call with this name."""
    return any(pattern.search(name) for pattern in (DEVICE_WAITS, STREAM_WAITS, EVENT_WAITS, MEMORY_WAITS))
