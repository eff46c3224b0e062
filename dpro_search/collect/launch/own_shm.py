"""Ranks of one machine that have a /dev/shm each: `with_own_shm`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.errors import MissingCapabilityError

_MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_CODE = f"import os, sys; os.execvp('unshare', ['unshare', '--mount', 'sh', '-c', {_MOUNT!r}, 'sh', *sys.argv[1:]])"


def with_own_shm(spec: JobSpec) -> JobSpec:
    """The job whose ranks have a /dev/shm of their own each; raises what `require_own_shm` does."""
    require_own_shm()
    return replace(spec, command=(spec.interpreter, "-c", _CODE, *spec.command))


def require_own_shm() -> None:
    """Raise `MissingCapabilityError` unless a rank can have a /dev/shm of its own."""
    if shutil.which("unshare") is None:
        raise MissingCapabilityError("a worker's own /dev/shm needs unshare: install util-linux")
    if os.geteuid() != 0:
        raise MissingCapabilityError("a worker's own /dev/shm needs root: run as root")
