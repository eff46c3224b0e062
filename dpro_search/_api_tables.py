"""`Tabular`: a value of the Python API as columns, and as a table of pandas where that is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpro_search.errors import MissingCapabilityError


class Tabular:
    """A value with rows."""

    def columns(self) -> dict[str, Any]:
        """The columns by name, all of one length; times in us, sizes in bytes."""
        raise NotImplementedError

    def to_frame(self) -> Any:
        """The columns as a ``pandas.DataFrame``.

        Raises
        ------
        MissingCapabilityError
            pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingCapabilityError(
                "to_frame() needs pandas: pip install 'dpro-search[notebook]'; columns() gives the same as a dict"
            ) from error
        return pd.DataFrame(self.columns())


def columns_of(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Columns with these names; None where a row lacks a value."""
    table = list(rows)
    return {name: [row.get(name) for row in table] for name in names}
