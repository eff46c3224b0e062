"""Devices that the user added with ``fit --collect device``: files in a folder of the user's, found by their names.

The folder is ``$DPRO_SEARCH_DEVICES``, else ``dpro-search/devices`` below ``$XDG_CONFIG_HOME`` (``~/.config``).
"""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """The folder of the files. It need not exist."""
    configured = os.environ.get("DPRO_SEARCH_DEVICES")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dpro-search" / "devices"


def names() -> tuple[str, ...]:
    """Names of the devices that are there."""
    return tuple(sorted(path.stem for path in folder().glob("*.toml")))


def file_of(name: str) -> Path | None:
    """The file of a device, by its name in lower case with hyphens; None without one."""
    path = folder() / f"{name}.toml"
    return path if path.parent == folder() and path.is_file() else None
