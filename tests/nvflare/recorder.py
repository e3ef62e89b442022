"""A probe on the wire: a filter at the server that writes down all of every task and of every result."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable


class Recorder(Filter):
    """Leaves a file of tensors, by their place in the message, and one of all else, for each message."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        tensors: dict[str, torch.Tensor] = {}
        rest: list[Any] = []
        _walk(dict(shareable), "", tensors, rest)
        way = fl_ctx.get_prop("__filter_dir__")
        path = Path(self.folder) / f"{way}-{uuid.uuid4().hex}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".safetensors").write_bytes(safetensors.torch.save(tensors))
        path.with_suffix(".json").write_text(json.dumps(rest))
        return shareable


def _walk(value: Any, place: str, tensors: dict[str, torch.Tensor], rest: list[Any]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _walk(each, f"{place}|{key}", tensors, rest)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _walk(each, f"{place}|{number}", tensors, rest)
    elif isinstance(value, torch.Tensor | np.ndarray):
        tensors[place] = torch.as_tensor(value).clone().contiguous()
    else:
        rest.append([place, str(value)])
