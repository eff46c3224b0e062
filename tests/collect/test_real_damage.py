"""Real files with one wrong byte: a small part is lost, it is counted, and the job does not get smaller unnoticed."""

from pathlib import Path

import numpy as np
import pytest
from importer_kit import plain, shared_traces

from dpro_search.collect.readers.importers import import_trace
from dpro_search.errors import DproSearchError

JOBS = {  # files of a job, of which the first is damaged
    "kineto": ("kineto_dlrm_8ranks/worker0_*", "kineto_dlrm_8ranks/worker1_*"),
    "horovod": ("tensorflow_horovod_2/timeline_default.json.gz",),
    "chakra": ("other_formats/chakra.0.et.gz",),
    "xplane": ("other_formats/jax_conv_8xMI300X.xplane.pb",),
    "runmetadata": ("tensorflow_horovod_2/rank0.v1_*", "tensorflow_horovod_2/rank1.v1_*"),
    "mxnet": ("mxnet_kvstore/worker0*", "mxnet_kvstore/worker1*", "mxnet_kvstore/server0*", "mxnet_kvstore/symbol.json"),
    "byteps": ("byteps_mxnet_2x2/worker0_comm*", "byteps_mxnet_2x2/worker1_comm*", "byteps_mxnet_2x2/van_*"),
}
MOST_LOST = 0.1  # of the events: also those that cannot be matched without the record
PLACES = 8


def copied(job: str, folder: Path) -> list[Path]:
    """The files of a job, unpacked."""
    collected = []
    for pattern in JOBS[job]:
        for path in sorted(shared_traces().glob(pattern)):
            collected.append(folder / path.name.removesuffix(".gz"))
            collected[-1].write_bytes(plain(path))
    return collected


@pytest.mark.parametrize("job", JOBS)
def test_a_wrong_byte_of_a_real_file_costs_little_and_is_told(job, tmp_path):
    paths = copied(job, tmp_path)
    data, whole, rng = paths[0].read_bytes(), import_trace(paths), np.random.default_rng(0)
    refusals = []
    for place in rng.integers(0, len(data), PLACES).tolist():
        paths[0].write_bytes(data[:place] + bytes([(data[place] + int(rng.integers(1, 256))) % 256]) + data[place + 1 :])
        try:
            trace = import_trace(paths)
        except DproSearchError as error:
            refusals.append(str(error))
            continue
        lost = len(whole.events) - len(trace.events)
        assert lost <= MOST_LOST * len(whole.events), f"byte {place}"
        assert trace.meta.ranks == whole.meta.ranks or trace.meta.warnings != whole.meta.warnings, f"byte {place}"
        assert lost <= 0 or trace.meta.dropped != whole.meta.dropped, f"byte {place}"
    assert len(refusals) <= 1
    assert all(str(paths[0]) in refusal for refusal in refusals)
