"""Models that `fit` wrote in version 3 of their format are read, and predict what they did.

``tests/data/models_v3.zip`` has a model of fused ops, of 80 clusters of the bundled table, and one of communication, of the made
all-reduces of `test_communication.py`; ``expected.json`` has their predictions for what is asked below. A format with another
number needs a file of its own here, and this one must be read, or refused in one line, for as long as such files are around.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from costmodel.fused.clusters import clusters

from dpro_search.costmodel.collectives.counts import Points
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.fused.features import shaped_features
from dpro_search.costmodel.fused.model_file import FusionModel
from dpro_search.errors import TraceVersionError

ARCHIVE = Path(__file__).parents[1] / "data" / "models_v3.zip"
KINDS = [("fused/model.json", FusionModel), ("communication/communication.json", CommunicationModel)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models_v3")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder / "models"


def expected(models: Path, name: str) -> list[float]:
    return list(json.loads((models / "expected.json").read_bytes())[name])


def test_a_model_of_fused_ops_predicts_what_it_did(models: Path) -> None:
    found = FusionModel.load(models / "fused").estimator.predict(shaped_features(clusters()[:20]))
    np.testing.assert_allclose(found, expected(models, "fused_us"), rtol=1e-4)


def test_a_model_of_communication_predicts_what_it_did(models: Path) -> None:
    axes = np.meshgrid(np.geomspace(1e3, 1e9, 5), (2, 8), (60.0, 250.0))
    asked = Points(**dict(zip(("size_bytes", "ranks", "link_bytes_per_us"), map(np.ravel, axes), strict=True)))
    found = CommunicationModel.load(models / "communication").predict("gloo ring", asked).us
    np.testing.assert_allclose(found, expected(models, "communication_us"), rtol=1e-6)


@pytest.mark.parametrize(("file", "kind"), KINDS, ids=["fused", "communication"])
def test_a_later_version_is_one_line(file: str, kind: type[FusionModel | CommunicationModel], models: Path, tmp_path: Path) -> None:
    info = msgspec.json.decode((models / file).read_bytes()) | {"version": 4}
    path = tmp_path / Path(file).name
    path.write_bytes(msgspec.json.encode(info))
    with pytest.raises(TraceVersionError) as refused:
        kind.load(tmp_path)
    assert str(refused.value) == f"{path}: model version 4, this program reads 3; train it again"
