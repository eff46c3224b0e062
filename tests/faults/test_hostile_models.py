"""Model files of `fit` that are made to do harm: each is a model with usable predictions, or one line of error that names the file.

Every field is replaced by each of `WRONG`, and every array by others: compiled loops look at no bounds.
"""

import io
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from dpro_search.collect.tables.clusters import bundled_model_path
from dpro_search.costmodel.collectives.counts import Algorithm, Points
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import Series
from dpro_search.costmodel.devices import Stack, gemm, model_file
from dpro_search.costmodel.fused.features import ClusterFeatures, feature_names
from dpro_search.costmodel.fused.model_file import FusionModel
from dpro_search.costmodel.fused.parts import NAMES_OF
from dpro_search.costmodel.intervals import Durations
from dpro_search.costmodel.model_files import MOST_BYTES
from dpro_search.errors import DproSearchError, TraceFormatError
from tests.faults.processes import SEARCH
from tests.in_process import fails_in_one_line
from tests.sample import HOROVOD_SAMPLE

T = TypeVar("T")

WRONG = (None, True, -1, 0, 1, 2**31, 10**30, -0.5, 1e-300, 1e300, "", "x", "9" * 400, [], [None], [[]], [0.0] * 3, [1e9] * 7, {})
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "[" * 200_000)  # as they stand in a file that is no JSON, or none that fits


def sweep(test):
    """Too long for every change: half a minute in all."""
    return pytest.mark.integration(pytest.mark.one_core(test))


def one_line(error: DproSearchError, path: Path) -> None:
    assert "\n" not in str(error)
    assert str(path) in str(error)
    assert len(str(error)) < 1000


def places(value: object, at: tuple = ()) -> Iterator[tuple]:
    """Of each field, and of the first and the last element of each list."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list) and value:
        for number in sorted({0, len(value) - 1}):
            yield from places(value[number], (*at, number))


def changed(whole: dict, place: tuple, value: object) -> dict:
    changed_copy = deepcopy(whole)
    inner = changed_copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed_copy


def hostile(whole: dict) -> Iterator[tuple[str, bytes]]:
    """Files of which one field is wrong, each with what is wrong."""
    for place in places(whole):
        for value in WRONG:
            yield f"{place} = {value!r:.40}", msgspec.json.encode(changed(whole, place, value))
    marked = msgspec.json.encode(changed(whole, next(iter(places(whole))), "HERE"))
    for text in RAW:
        yield text[:20], marked.replace(b'"HERE"', text.encode())
        yield text[:20], text.encode()


def or_refused(path: Path, load: Callable[[], T]) -> T | None:
    """What is loaded; None: it is refused in one line that names the path."""
    try:
        return load()
    except DproSearchError as error:
        one_line(error, path)
        return None


def assert_usable(found: Durations, what: object) -> None:
    """Each prediction is a number with an interval, or none is made."""
    said = ~np.isnan(found.us)
    assert np.isfinite([found.us[said], found.low_us[said], found.high_us[said]]).all(), what


# model.json


@pytest.fixture
def fused(tmp_path) -> Path:
    """A copy of the bundled model with few points, so that each change is quick."""
    folder = shutil.copytree(bundled_model_path(), tmp_path / "model")
    info = msgspec.json.decode((folder / "model.json").read_bytes())
    for sees in ("shapes", "times"):
        for name, kept in (("residuals", 5), ("domain_points", 2), ("scores", -1)):
            info[sees][name] = info[sees][name][kept:] if kept < 0 else info[sees][name][:kept]
    (folder / "model.json").write_bytes(msgspec.json.encode(info))
    return folder


def of_any(sees: str) -> ClusterFeatures:
    """Five clusters of one part each, with ordinary numbers."""
    random = np.random.default_rng(0)
    return ClusterFeatures(
        whole=random.uniform(0, 100, (5, len(feature_names(sees)))),
        parts=np.column_stack([np.zeros(5), random.uniform(0, 100, (5, len(NAMES_OF[sees]) - 1))]),
        of=np.arange(5),
    )


@sweep
def test_every_field_of_a_model_may_hold_anything(fused):
    path = fused / "model.json"
    whole = msgspec.json.decode(path.read_bytes())
    whole = {"times": whole["times"], **{name: value for name, value in whole.items() if name != "times"}}
    read = refused = 0
    for what, data in hostile(whole):
        path.write_bytes(data)
        model = or_refused(fused, lambda: FusionModel.load(fused))
        refused += model is None
        read += model is not None
        for cost in (model.shaped, model.timed) if model else ():
            assert_usable(cost.predict_interval(of_any(cost.sees)), what)
    assert read > 10
    assert refused > 1000


@pytest.mark.parametrize("damage", [{"shapes_leaf": lambda leaf: leaf * 2}, {"shapes_feature": lambda feature: feature + 200}])
def test_a_model_of_other_trees_is_refused(damage, fused):
    with np.load(fused / "trees.npz") as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(fused / "trees.npz", **{name: damage.get(name, np.asarray)(array) for name, array in arrays.items()})
    with pytest.raises(TraceFormatError, match=r"trees\.npz: damaged or (of another model|no trees)"):
        FusionModel.load(fused)


@pytest.mark.parametrize(("name", "message"), [("model.json", "more than 64 MiB, as no model has"), ("trees.npz", "damaged")])
def test_a_file_of_any_size_is_not_read(name, message, fused):
    with (fused / name).open("r+b") as file:
        file.truncate(MOST_BYTES + 1)  # takes no room on the disk
    with pytest.raises(TraceFormatError, match=rf"{name}: {message}"):
        FusionModel.load(fused)


@pytest.mark.parametrize("name", ["model.json", "trees.npz"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name, fused):
    (fused / name).unlink()
    os.mkfifo(fused / name)
    with pytest.raises(DproSearchError, match=rf"{name}: (no file|cannot be read)"):
        FusionModel.load(fused)


def test_a_search_says_in_one_line_what_is_wrong_with_a_model(fused, tmp_path):
    whole = msgspec.json.decode((fused / "model.json").read_bytes())
    (fused / "model.json").write_bytes(msgspec.json.encode(changed(whole, ("shapes", "scores"), [])))
    search = (*SEARCH, 5, "--sample", HOROVOD_SAMPLE, "--with", "op-fusion", "--cluster-model", fused, "--out", tmp_path / "run")
    assert "no score of all models" in fails_in_one_line(2, *search)


# the model of communication


@cache
def communication() -> dict:
    """Of a real fit to some points on a line."""
    size, ranks = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(10, 20), [2.0, 4.0]))
    points = Points(size_bytes=size, ranks=ranks, link_bytes_per_us=np.full(len(size), 250.0))
    series = Series(
        name="gloo",
        points=points,
        duration_us=100 + size * 0.01 * ranks,
        spread_pct=np.full(len(size), np.nan),
        algorithms=(Algorithm.RING,),
    )
    return msgspec.to_builtins(CommunicationModel.train([series], ["a table"]).info)


@sweep
def test_every_field_of_a_model_of_communication_may_hold_anything(tmp_path):
    path = tmp_path / "communication.json"
    whole = communication()
    points = Points(size_bytes=np.full(3, 1e5), ranks=np.array(3.0), link_bytes_per_us=np.array(200.0))
    read = refused = 0
    for what, data in hostile(whole):
        path.write_bytes(data)
        model = or_refused(path, lambda: CommunicationModel.load(tmp_path))
        refused += model is None
        read += model is not None
        for name, cost in model.costs.items() if model else ():
            if len(cost.scores):
                assert_usable(model.predict(name, points), what)
    assert read > 10
    assert refused > 100


# the predictor of devices


@cache
def latency() -> dict[str, np.ndarray]:
    with np.load(Path(str(files("dpro_search.costmodel.devices") / "latency.npz"))) as file:
        return {name: file[name] for name in file.files}


def wrong_arrays(array: np.ndarray) -> Iterator[np.ndarray]:
    yield array[:0]
    yield array[None]
    yield array[..., :-1]
    yield array[:1]
    yield array.astype(np.complex128)
    yield array.astype(str)
    yield np.zeros(())
    for value in (255, -1, 0, 1e30, np.nan, np.inf, -np.inf):
        with np.errstate(invalid="ignore"):
            yield np.full_like(array, value, dtype=np.float64).astype(array.dtype)


@sweep
def test_every_array_of_a_latency_file_may_hold_anything(tmp_path):
    from dpro_search.cluster import bundled
    from dpro_search.costmodel.devices import DeviceProfile, Probes

    profile = DeviceProfile(device=bundled.device("a100-sxm-80gb"), probes=Probes())
    op = gemm(4096, 4096, 4096, precision="bf16", stack=Stack.SERVING, transposes=1.0)
    path = tmp_path / "latency.npz"
    refused = 0
    for name, array in latency().items():
        for wrong in wrong_arrays(array):
            np.savez(path, **{**latency(), name: wrong})
            prediction = or_refused(path, lambda: model_file.load(path)[0].on(profile).predict(op))
            refused += prediction is None
            if prediction is not None:
                assert_usable(prediction, (name, wrong.ravel()[:1]))
    assert refused > 80


def test_a_latency_file_that_would_fill_the_memory_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "latency.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("info.npy", header.getvalue() + bytes(100))
    with pytest.raises(TraceFormatError, match=r"latency.npz: damaged"):
        model_file.load(tmp_path / "latency.npz")
