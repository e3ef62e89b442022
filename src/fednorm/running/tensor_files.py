"""Files of tensors: safetensors, each with a digest of all that is in it, checked when it is read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from fednorm.core.state import Tree, digest
from fednorm.errors import CheckpointError
from fednorm.files import written_whole

_DIGEST = "sha256"
_OF = "sha256_of"
_ALL = "tensors and metadata"
"""Said beside the digest: a file in which one of the two words is damaged has the other."""


def load_tree(path: Path) -> Tree:
    """The tensors of a safetensors file, or an error that says what the file is not.

    A file of fednorm's has a digest, which must be right; others need none.
    """
    if path.is_dir():
        raise CheckpointError(f"'{path}' is a folder; give a .safetensors file")
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
        tree = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' does not exist; give a .safetensors file") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' is not a safetensors file ({error}); pickle files are never read") from None
    if (_DIGEST in metadata or _OF in metadata) and metadata.get(_DIGEST) != _digest(tree, metadata):
        raise CheckpointError(f"'{path}' is damaged (its digest differs); export it again, or give another file")
    return tree


def save_tree(path: Path, tree: Tree, metadata: Mapping[str, str]) -> None:
    """Write tensors as a safetensors file, whole or not at all."""
    told = {**metadata, _OF: _ALL}
    told[_DIGEST] = _digest(tree, told)
    with written_whole(path) as draft:
        try:
            safetensors.torch.save_file(tree, draft, metadata=told)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))  # the system's own number is all it keeps of a full disk
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _digest(tree: Tree, metadata: Mapping[str, str]) -> str:
    about = {key: value for key, value in metadata.items() if key != _DIGEST}
    return hashlib.sha256(json.dumps([digest(tree), about], sort_keys=True).encode()).hexdigest()
