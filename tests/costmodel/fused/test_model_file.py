"""A model file is data: it gives back the model, and says clearly when it cannot."""

import contextlib

import msgspec
import numpy as np
import pytest
from costmodel.fused.clusters import clusters, model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.costmodel.fused.features import shaped_features, timed_features
from dpro_search.costmodel.fused.flatten import flatten
from dpro_search.costmodel.fused.model_file import FusionModel
from dpro_search.costmodel.fused.timed import timed_ops
from dpro_search.errors import DproSearchError, InputError, TraceFormatError, TraceVersionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model"
    model().save(path)
    return path


def changed(folder, tmp_path, **fields):
    """A copy of the model whose model.json has other fields."""
    info = msgspec.json.decode((folder / "model.json").read_bytes()) | fields
    copy = tmp_path / "changed"
    copy.mkdir()
    (copy / "model.json").write_bytes(msgspec.json.encode(info))
    (copy / "trees.npz").write_bytes((folder / "trees.npz").read_bytes())
    return copy


def test_a_loaded_model_predicts_what_the_saved_one_did(folder):
    timed = timed_features(timed_ops(flatten(clusters())))
    reread = FusionModel.load(folder)
    for before, after, features in (
        (model().shaped, reread.shaped, shaped_features(clusters())),
        (model().timed, reread.timed, timed),
    ):
        saved, loaded = before.predict_interval(features), after.predict_interval(features)
        np.testing.assert_allclose(loaded.us, saved.us)
        np.testing.assert_allclose(loaded.high_us, saved.high_us)
        np.testing.assert_array_equal(loaded.origin, saved.origin)


def test_it_says_where_its_rows_were_measured_and_how_good_it_is(folder):
    info = FusionModel.load(folder).info
    assert info.sources[0].machine
    assert info.sources[0].versions["tensorflow"]
    assert info.scores == model().info.scores


def test_another_version_is_refused(folder, tmp_path):
    with pytest.raises(TraceVersionError, match="model version 99"):
        FusionModel.load(changed(folder, tmp_path, version=99))


def test_missing_features_are_named(folder, tmp_path):
    features = list(model().info.shapes.features)
    features[0] = "something_else"
    with pytest.raises(InputError, match="something_else"):
        FusionModel.load(changed(folder, tmp_path, shapes=msgspec.to_builtins(model().info.shapes) | {"features": features}))


def test_an_existing_model_is_not_overwritten(folder):
    with pytest.raises(InputError, match="exists already"):
        model().save(folder)


def test_a_missing_model_is_said_to_be_missing(tmp_path):
    with pytest.raises(InputError, match="dpro-search fit"):
        FusionModel.load(tmp_path / "nothing")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["model.json", "trees.npz"]), cut=st.floats(0, 0.999))
def test_a_file_that_is_cut_off_is_refused_in_one_line(folder, tmp_path_factory, name, cut):
    copy = tmp_path_factory.mktemp("cut")
    for path in folder.iterdir():
        data = path.read_bytes()
        (copy / path.name).write_bytes(data[: int(len(data) * cut)] if path.name == name else data)
    with pytest.raises(DproSearchError) as error:
        FusionModel.load(copy)
    assert isinstance(error.value, TraceFormatError | InputError)
    assert "\n" not in str(error.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_in_the_description_never_crashes(folder, tmp_path_factory, data):
    copy = tmp_path_factory.mktemp("flipped")
    (copy / "trees.npz").write_bytes((folder / "trees.npz").read_bytes())
    raw = bytearray((folder / "model.json").read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (copy / "model.json").write_bytes(raw)
    with contextlib.suppress(DproSearchError):
        FusionModel.load(copy)
