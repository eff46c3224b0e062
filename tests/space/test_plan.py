"""A plan: settings that several schemes know, and those of one scheme."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from dpro_search.errors import InputError
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, owner_of, refuse_unknown, setting_names
from dpro_search.space.plan_json import by_setting, decoded
from dpro_search.space.schemes import BytepsSettings, DdpSettings, FsdpSettings, HorovodSettings, KvstoreSettings, scheme_types
from tests.every_case import every_case

PLANS = [
    Plan(),
    Plan(servers=3, servers_on_workers=True, compression="fp16"),
    Plan(scheme=HorovodSettings(fusion_threshold_bytes=0, allreduce_algorithms=((0, "ring"), (65536, "rabenseifner")))),
    Plan(scheme=DdpSettings(bucket_cap_bytes=2**20), tensor_groups=(("a", "b"),)),
    Plan(scheme=FsdpSettings(reshard_after_forward=False), micro_batches=4),
    Plan(scheme=KvstoreSettings(p3=True, slice_threshold=4000), servers=2),
    Plan(scheme=BytepsSettings(partition_bytes=4096, credit=0), servers=2),
]
parametrized = pytest.mark.parametrize("plan", PLANS, ids=describe)


@parametrized
def test_settings_by_name_make_the_same_plan(plan: Plan) -> None:
    made = Plan.of(**plan.settings)
    assert (made, hash(made)) == (plan, hash(plan))
    assert plan.settings == {name: value for name in setting_names() if (value := plan.get(name)) is not None}


@parametrized
def test_json_and_pickle_give_the_plan_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@parametrized
def test_settings_side_by_side_are_a_plan_too(plan: Plan) -> None:
    flat = by_setting({"plan": plan})["plan"]
    assert flat == msgspec.to_builtins(plan.settings)
    assert Plan.from_json(msgspec.json.encode({"version": 2, **flat})) == plan
    assert decoded(msgspec.json.encode([{"plan": flat}]), list[dict[str, Plan]]) == [{"plan": plan}]


def test_json_names_the_scheme() -> None:
    assert msgspec.json.decode(Plan.of(servers=2, credit=4).to_json()) == {
        "version": 2,
        "servers": 2,
        "scheme": {"name": "byteps", "credit": 4},
    }


def test_a_scheme_without_settings_is_none() -> None:
    assert Plan(scheme=HorovodSettings()) == Plan()
    assert Plan.of(cycle_time_us=5.0, prefetch=None).changed(cycle_time_us=None) == Plan()
    assert Plan(scheme=HorovodSettings()).to_json() == Plan().to_json()


def test_changes_keep_what_they_do_not_name() -> None:
    plan = Plan.of(fusion_threshold_bytes=1, micro_batches=2)
    assert plan.changed(cycle_time_us=5.0) == Plan.of(fusion_threshold_bytes=1, cycle_time_us=5.0, micro_batches=2)
    assert plan.changed(micro_batches=None, bucket_cap_bytes=None) == Plan.of(fusion_threshold_bytes=1)
    assert plan.changed(fusion_threshold_bytes=None, bucket_cap_bytes=7).scheme == DdpSettings(bucket_cap_bytes=7)


def test_the_settings_of_another_scheme_are_none() -> None:
    plan = Plan.of(p3=True)
    assert KvstoreSettings.of(plan).p3 is True
    assert HorovodSettings.of(plan) == HorovodSettings()
    assert (plan.get("p3"), plan.get("cycle_time_us")) == (True, None)


def test_a_setting_has_one_home() -> None:
    names = setting_names()
    assert len(set(names)) == len(names)
    assert all(name in owner.__struct_fields__ for name in names if (owner := owner_of(name)) is not None)
    tags = [each.__struct_config__.tag for each in scheme_types()]
    assert len(set(tags)) == len(tags)


@every_case(
    ("settings", "reason"),
    [
        ({"cycle_time_u": 5.0}, "plan: no setting is called 'cycle_time_u'; did you mean cycle_time_us?"),
        ({"scheme": None}, "plan: no setting is called 'scheme'"),
        (
            {"cycle_time_us": 5.0, "p3": True},
            "cycle_time_us is a setting of Horovod and p3 one of MXNet's KVStore: a plan has settings of one of them",
        ),
        ({"cycle_time_us": 0.0}, "cycle_time_us must be > 0, not 0.0"),
        ({"cycle_time_us": float("nan")}, "cycle_time_us must be at most 1e+15"),
        ({"fusion_threshold_bytes": -1}, "fusion_threshold_bytes must be >= 0, not -1"),
        ({"credit": -1}, "credit must be >= 0, not -1"),
        ({"servers": 0}, "servers must be > 0, not 0"),
        ({"bigarray_bound": 1e16}, "bigarray_bound must be at most 1e+15"),
        ({"allreduce_algorithms": ((1, "ring"),)}, "allreduce_algorithms: sizes must begin at 0 and grow"),
        ({"tensor_groups": (("a",), ("a",))}, "tensor_groups: tensor 'a' is in two groups"),
    ],
)
def test_what_makes_no_plan_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError) as refused:
        Plan.of(**settings)
    assert str(refused.value).startswith(reason)


@every_case(
    ("raw", "reason"),
    [
        ('{"version": 3}', "p.json: plan version 3, this program reads 1 to 2"),
        ('{"cycle_time_us": 5.0}', "p.json: plan version None, this program reads 1 to 2"),
        ('{"version": 2, "cycle_time": 5.0}', "p.json: unknown field 'cycle_time' (known: fusion_threshold_bytes, "),
        ('{"version": 2, "scheme": {"name": "gossip"}}', "p.json: not a plan (scheme: a name is one of horovod, ddp, "),
        ('{"version": 2, "scheme": {"name": ["ddp"]}}', "p.json: not a plan (scheme: a name is one of "),
        ('{"version": 2, "scheme": 7}', "p.json: not a plan (scheme: a name is one of "),
        ('{"version": 2, "scheme": {"name": "ddp", "p3": true}}', "p.json: not a plan (Object contains unknown field `p3`"),
        ('{"version": 2, "scheme": {"name": "ddp", "bucket_cap_bytes": "9"}}', "p.json: not a plan (Expected `int | null`"),
        ('{"version": 2, "scheme": {"name": "ddp"}, "p3": true}', "p.json: not a plan (Object contains unknown field `p3`"),
        ('{"version": 1, "credit": 1, "p3": true}', "p.json: not a plan (credit is a setting of BytePS and p3 one of MXNet's"),
    ],
)
def test_what_is_no_plan_is_one_line(raw: str, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        Plan.from_json(raw.encode(), "p.json")
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)


def test_a_refusal_says_whose_the_setting_is() -> None:
    with pytest.raises(InputError) as refused:
        refuse_unknown(Plan.of(prefetch=True), ("bucket_cap_bytes",), "a DDP job")
    assert (
        str(refused.value) == "plan: a DDP job has no prefetch; it knows bucket_cap_bytes (prefetch is a setting of PyTorch FSDP)"
    )


def test_plans_in_other_files_are_not_read_in_part() -> None:
    """A setting that this version does not know must not be dropped without a word."""
    with pytest.raises(msgspec.ValidationError, match="unknown field `new_setting`"):
        decoded(b'{"plan": {"new_setting": 1}}', dict[str, Plan])
