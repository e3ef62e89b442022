"""Data: sets by name, partitions, federations, batch streams, augmentation. Names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fednorm.data.build import make_federation as make_federation
    from fednorm.data.federation import Federation as Federation
    from fednorm.data.given import from_clients as from_clients
    from fednorm.data.given import from_pool as from_pool
    from fednorm.data.image_set import ImageSet as ImageSet
    from fednorm.data.load import load_dataset as load_dataset
    from fednorm.data.partition import PARTITIONS as PARTITIONS
    from fednorm.data.registry import DATASETS as DATASETS
    from fednorm.data.registry import DatasetInfo as DatasetInfo
    from fednorm.data.streams import Stream as Stream
    from fednorm.data.streams import batch_rows as batch_rows
    from fednorm.data.streams import batches_per_epoch as batches_per_epoch

_HOME = {
    "DATASETS": "registry",
    "DatasetInfo": "registry",
    "Federation": "federation",
    "ImageSet": "image_set",
    "PARTITIONS": "partition",
    "Stream": "streams",
    "batch_rows": "streams",
    "batches_per_epoch": "streams",
    "from_clients": "given",
    "from_pool": "given",
    "load_dataset": "load",
    "make_federation": "build",
}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fednorm.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fednorm.data.{_HOME[name]}"), name)
