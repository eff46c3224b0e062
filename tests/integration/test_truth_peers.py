"""Peers as their packages ship them: each prices a run of a bundled model between its FLOPs' least time and eight times that."""

import pytest

from dpro_search.errors import InputError
from dpro_search.parallel.model import parameters_of, published
from experiments.truth import peers
from experiments.truth.rows import Row

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

RUN = {
    "source": "one", "gpu": "H100", "gpus_per_node": "8", "n_gpus": "64", "model": "llama", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "4096", "precision": "bf16", "dp": "8",
    "tp": "4", "pp": "2", "micro_batch": "1", "global_batch": "128", "framework": "NeMo",
}  # fmt: skip


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_run_takes_at_least_its_flops(peers_python, name):
    predicted = peers.predictor(name)(Row(RUN))
    least_s = 6 * parameters_of(published("llama3-8b")) * 128 * 4096 / (64 * 989e12)
    assert 0.9 * least_s < predicted.step_s < 8 * least_s
    assert predicted.memory_bytes > 0
    assert predicted.fits == (predicted.memory_bytes <= 80e9)


@pytest.mark.parametrize("name", peers.PEERS)
def test_what_a_peer_does_not_have_is_left_out_with_a_reason(peers_python, name):
    with pytest.raises(InputError, match="context parallelism"):
        peers.predictor(name)(Row({**RUN, "dp": "4", "cp": "2"}))
