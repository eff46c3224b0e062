"""What the helper of an MXNet Trainer does beside its keyword arguments; MXNet stands in as the one class that it changes."""

import importlib.util
import sys
from types import ModuleType

import pytest

from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.stores import BYTEPS, MXNET
from dpro_search.space.plan import Plan


class Store:
    """KVStore's calls, as MXNet 1.9.1 makes them."""

    def __init__(self):
        self.calls = []

    def push(self, key, value, priority=0):
        self.calls.append(("push", key, value, priority))

    def pull(self, key, out=None, priority=0, ignore_sparse=True):
        self.calls.append(("pull", key, out, priority))

    def pushpull(self, key, value, out=None, priority=0):
        raise RuntimeError("Compression not supported with PushPull")


@pytest.fixture
def options_of(tmp_path, monkeypatch):
    """`planned_options` of a plan for some target, in a process with such an MXNet; and its KVStore."""

    def planned(plan, target):
        store = type("KVStore", (Store,), {})
        kvstore = ModuleType("mxnet.kvstore")
        kvstore.KVStore = store
        monkeypatch.setitem(sys.modules, "mxnet", ModuleType("mxnet"))
        monkeypatch.setitem(sys.modules, "mxnet.kvstore", kvstore)
        export_plan(plan, tmp_path / "out", (target,))
        spec = importlib.util.spec_from_file_location("trainer", tmp_path / "out" / "trainer.py")
        helper = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(helper)
        return helper.planned_options(), store()

    return planned


def test_compressed_gradients_are_pushed_and_weights_pulled_by_calls_of_their_own(options_of):
    options, store = options_of(Plan(compression="2bit"), MXNET)
    assert options == {"compression_params": {"type": "2bit", "threshold": 0.5}}
    store.pushpull(3, "gradient", out="weight", priority=-3)
    store.pushpull(4, "gradient")
    assert store.calls[:2] == [("push", 3, "gradient", -3), ("pull", 3, "weight", -3)]
    assert store.calls[2:] == [("push", 4, "gradient", 0), ("pull", 4, "gradient", 0)]


def test_other_jobs_keep_their_calls(options_of):
    options, store = options_of(Plan(compression="fp16"), BYTEPS)
    assert options == {"compression_params": {"fp16": True}}
    with pytest.raises(RuntimeError, match="PushPull"):
        store.pushpull(3, "gradient")
