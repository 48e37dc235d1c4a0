"""What an HDF5 file shows as its own and does not hold: links, external storage, virtual data sets over other files."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import needs

with needs("io", "data sets"):
    import h5py

MOST_LINKS = 16
"""Soft links one after the other."""


class Reference(NamedTuple):
    """what: in words;   file: the name, as written there, of the file that it leads to; None for this one."""

    what: str
    file: str | None = None


def elsewhere(file: h5py.File, name: str, hops: int = 0, known: set[str] | None = None) -> Iterator[Reference]:
    """What the data set of that name refers to, in the order in which it is found: each before it is opened. Those data
    sets of the file whose names are `known` have been looked at.

    Raises OSError for links without an end.
    """
    known = set() if known is None else known
    if hops > MOST_LINKS:
        raise OSError(f"more than {MOST_LINKS} links one after the other")
    group, path = file, "/"
    for part in filter(None, name.split("/")):
        link, path = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None, f"{path}{part}"
        if isinstance(link, h5py.ExternalLink):
            yield Reference(f"an external link to {link.filename}", link.filename)
        elif isinstance(link, h5py.SoftLink):
            yield Reference(f"a soft link to {link.path!r}")
            yield from elsewhere(file, posixpath.join(posixpath.dirname(path), link.path), hops + 1, known)
        group, path = (group.get(part) if link is not None else None), f"{path}/"
    if isinstance(group, h5py.Dataset):
        yield from _storage(file, group, hops, known)


def _storage(file: h5py.File, dataset: h5py.Dataset, hops: int, known: set[str]) -> Iterator[Reference]:
    for name, _, _ in dataset.external or ():
        yield Reference(f"external storage in {name}", os.path.abspath(name))
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if source.file_name == "." and source.dset_name not in known:
            yield from elsewhere(file, source.dset_name, hops + 1, known)
            known.add(source.dset_name)
        elif source.file_name != ".":
            yield Reference(f"a virtual data set over {source.file_name}", source.file_name)


def located(reference: Reference, path: str) -> list[str]:
    """The files that HDF5 may read for a reference in the file `path`. Raises FileNotFoundError if there is none."""
    if reference.file is None:
        return []
    places = {os.path.join(os.path.dirname(path), reference.file), reference.file}
    if not (there := sorted(place for place in places if os.path.exists(place))):
        raise FileNotFoundError(f"it is {reference.what}, which is not there")
    return there


def parts_of(file: h5py.File, dataset: h5py.Dataset) -> list[h5py.Dataset]:
    """The data set, and those of the file that it is a virtual view of. Raises OSError for one that is not there."""
    found, names = [dataset], {dataset.name}
    for part in found:
        for source in part.virtual_sources() if part.is_virtual else ():
            inside = file.get(source.dset_name) if source.file_name == "." else None
            if source.file_name == "." and not isinstance(inside, h5py.Dataset):
                raise OSError(f"the data set {source.dset_name!r}, of which it is a view, is not there")
            if inside is not None and inside.name not in names:
                found.append(inside)
                names.add(inside.name)
    return found
