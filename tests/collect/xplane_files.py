"""Planes of a profile in the format of XPlane, as the tests of its readers write them."""

from typing import Any


class Plane:
    """A plane that is being written; names of events and of their stats are numbered as they come."""

    def __init__(self, space: Any, name: str) -> None:
        self._plane = space.planes.add(name=name)
        self._keys: dict[tuple[str, str], int] = {}

    def line(self, number: int, start_ns: int, name: str = "") -> Any:
        """A new line, whose events begin at an instant."""
        return self._plane.lines.add(id=number, name=name, timestamp_ns=start_ns)

    def add(self, line: Any, name: str, start_us: float, duration_us: float, stats: dict[str, str | int]) -> None:
        """An event of a line; times are from the line's beginning on."""
        event = line.events.add(metadata_id=self._key("event_metadata", name))
        event.offset_ps, event.duration_ps = round(start_us * 1e6), round(duration_us * 1e6)
        for stat_name, value in stats.items():
            stat = event.stats.add(metadata_id=self._key("stat_metadata", stat_name))
            if isinstance(value, int):
                stat.int64_value = value
            else:
                stat.ref_value = self._key("stat_metadata", value)

    def _key(self, table: str, name: str) -> int:
        key = self._keys.setdefault((table, name), len(self._keys) + 1)
        entries = getattr(self._plane, table)
        if all(entry.key != key for entry in entries):
            entries.add(key=key).value.name = name
        return key
