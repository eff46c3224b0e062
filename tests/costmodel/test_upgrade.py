"""Models that `fit` wrote in earlier versions of their formats are read, and predict what they did, or are refused in one line.

``tests/data/models_v3.zip`` has a model of fused ops, of 80 clusters of the bundled table, and one of communication, of the made
all-reduces of `test_communication.py`. ``models_v4.zip`` has a model of fused ops of the same clusters. ``expected.json`` has their
predictions for what is asked below. A format with another number needs a file of its own here, and these must be read, or refused
in one line, for as long as such files are around. A model of fused ops of version 3 is refused: it was trained on kernels as a
simulated compiler made them, which no longer exists; its table is still read, so that it can be trained again.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpro_search.collect.tables.clusters import bundled_table_path, read_table
from dpro_search.costmodel.collectives.counts import Points
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.fused.features import shaped_features
from dpro_search.costmodel.fused.model_file import FusionModel
from dpro_search.errors import TraceVersionError

DATA = Path(__file__).parents[1] / "data"
EVERY = 6  # clusters of the bundled table: one of so many has its prediction in `expected.json`
KINDS = [("fused/model.json", FusionModel, 4), ("communication/communication.json", CommunicationModel, 3)]


def extracted(version: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(f"models_v{version}")
    with zipfile.ZipFile(DATA / f"models_v{version}.zip") as archive:
        archive.extractall(folder)
    return folder / "models"


@pytest.fixture(scope="module")
def models_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(3, tmp_path_factory)


@pytest.fixture(scope="module")
def models_v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(4, tmp_path_factory)


def expected(models: Path, name: str) -> list[float]:
    return list(json.loads((models / "expected.json").read_bytes())[name])


def test_a_model_of_fused_ops_predicts_what_it_did(models_v4: Path) -> None:
    clusters = [row.cluster for row in read_table(bundled_table_path()).measured[::EVERY]]
    predicted_us = FusionModel.load(models_v4 / "fused").shaped.predict(shaped_features(clusters[:20]))
    np.testing.assert_allclose(predicted_us, expected(models_v4, "fused_us"), rtol=1e-4)


def test_a_model_of_fused_ops_of_a_simulated_compiler_is_refused_in_one_line(models_v3: Path) -> None:
    path = models_v3 / "fused" / "model.json"
    with pytest.raises(TraceVersionError) as refused:
        FusionModel.load(path.parent)
    assert str(refused.value) == f"{path}: model version 3, this program reads 4; train it again"


def test_a_model_of_communication_predicts_what_it_did(models_v3: Path) -> None:
    axes = np.meshgrid(np.geomspace(1e3, 1e9, 5), (2, 8), (60.0, 250.0))
    points = Points(**dict(zip(("size_bytes", "ranks", "link_bytes_per_us"), map(np.ravel, axes), strict=True)))
    predicted_us = CommunicationModel.load(models_v3 / "communication").predict("gloo ring", points).us
    np.testing.assert_allclose(predicted_us, expected(models_v3, "communication_us"), rtol=1e-6)


@pytest.mark.parametrize(("file", "kind", "version"), KINDS, ids=["fused", "communication"])
def test_a_later_version_is_one_line(
    file: str, kind: type[FusionModel | CommunicationModel], version: int, models_v3: Path, tmp_path: Path
) -> None:
    info = msgspec.json.decode((models_v3 / file).read_bytes()) | {"version": version + 1}
    path = tmp_path / Path(file).name
    path.write_bytes(msgspec.json.encode(info))
    with pytest.raises(TraceVersionError) as refused:
        kind.load(tmp_path)
    assert str(refused.value) == f"{path}: model version {version + 1}, this program reads {version}; train it again"
