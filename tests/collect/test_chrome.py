"""Files of Chrome traces of which every event can be read, and yet not all is well: said, whoever reads them."""

import gzip

import msgspec

from dpro_search.collect.readers._chrome import chrome_events


class Event(msgspec.Struct):
    ph: str
    ts: int


def test_a_changed_digit_of_a_compressed_file_is_told_though_all_is_read(tmp_path):
    packed = bytearray(gzip.compress(b'{"traceEvents": [{"ph": "X", "ts": 12}]}', compresslevel=0))
    packed[packed.index(b"12")] = ord("9")
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed)
    events, dropped = chrome_events(path, Event)
    assert events == [Event("X", 92)]
    assert dropped == {f"damaged checksum of {tmp_path.name}/t.json.gz: any of its records may be wrong": 1}


def test_an_undamaged_file_tells_nothing(tmp_path):
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X", "ts": 12}]}'))
    assert not chrome_events(tmp_path / "t.json.gz", Event)[1]


def test_an_object_cut_off_between_two_events_is_told(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "X", "ts": 12},\n  ')
    events, dropped = chrome_events(path, Event)
    assert events == [Event("X", 12)]
    assert dropped == {f"records cut off at the end of {tmp_path.name}/t.json": 1}


def test_a_bare_list_needs_no_end(tmp_path):
    (tmp_path / "t.json").write_text('[{"ph": "X", "ts": 12},\n')
    assert chrome_events(tmp_path / "t.json", Event) == ([Event("X", 12)], {})
