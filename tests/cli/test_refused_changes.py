"""Changes that a recorded job cannot have are refused with a line that names them."""

import pytest

from dpro_search.errors import InputError
from tests.cli.facts import replayed
from tests.every_case import every_case
from tests.recordings import trace_of

REFUSED = {
    "ddp_mlp": {
        "cycle_time_us=3": "has no knob 'cycle_time_us'",
        "bucket_cap_bytes=big": "'big' is not a size",
        "rate=fast": "'fast' is not a rate",
    },
    "fsdp_mlp": {
        "bucket_cap_bytes=3": "has no knob 'bucket_cap_bytes'",
        "prefetch=0": "only 1 can be replayed",
        "reshard_after_forward=1": "only 0 can be replayed",
        "prefetch=maybe": "neither on nor off",
    },
    "byteps_mlp": {
        "fusion_threshold_bytes=1": "a job with BytePS has no knob 'fusion_threshold_bytes' .known: servers, servers_on_workers, "
        "partition_bytes, credit",
        "partition_bytes=many": "'many' is not a size",
        "servers=0": "servers must be > 0",
        "compression=2bit": "compression '2bit': a job with BytePS has fp16",
    },
}


@every_case(
    ("recording", "change", "message"),
    [(recording, change, message) for recording, refused in REFUSED.items() for change, message in refused.items()],
)
def test_a_change_that_cannot_be_made_is_named(recording, change, message):
    with pytest.raises(InputError, match=message):
        replayed(trace_of(recording), changes=(change,))
