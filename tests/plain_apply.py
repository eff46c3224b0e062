"""`apply` as one would write it first, without a prepared job or compiled passes: what the fast one is compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np


def plain_apply(job, profiles, unit_of, sizes):
    """A job like `job`, with the posts, sizes and releases of some units.

    Parameters
    ----------
    profiles
        Of each class of ranks.
    unit_of, sizes
        Unit and bytes of each tensor.
    """
    units = int(unit_of.max()) + 1
    post = np.zeros((job.samples, len(profiles), units))
    for number, profile in enumerate(profiles):
        for tensor, unit in enumerate(unit_of):
            post[:, number, unit] = np.maximum(post[:, number, unit], profile.post_us[:, tensor])
    listing = np.argsort(post.mean(axis=(0, 1)), kind="stable")
    position = np.argsort(listing)
    order = np.argsort(post, axis=2, kind="stable")
    owner, works, waits = [], [], []
    for number, profile in enumerate(profiles):
        merged = {}
        for release in profile.releases:
            key = tuple(sorted(set(position[unit_of[list(release.tensors)]].tolist())))
            merged[key] = merged.get(key, 0.0) + release.work_us
        owner += [number] * len(merged)
        works += list(merged.values())
        waits += list(merged)
    return replace(
        job,
        post_us=np.take_along_axis(post, order, axis=2),
        post_order=position[order],
        unit_bytes=np.bincount(position[unit_of], weights=sizes, minlength=units),
        unit_tensors=np.bincount(position[unit_of], minlength=units),
        release_class=np.array(owner),
        release_work_us=np.stack(works, axis=1),
        release_ptr=np.cumsum([0, *map(len, waits)]),
        release_unit=np.array([unit for units_of_one in waits for unit in units_of_one]),
    )
