"""Files of JSON with a digest over all that is in them, so that one that was damaged or edited is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fednorm.files import json_text

SHA = "sha256"


def digest_of(value: Mapping[str, Any]) -> str:
    """The digest of a value as it is read back from a file; its own digest in it does not count.

    >>> digest_of({"b": 1, "a": {7: 0.5}}) == digest_of({"a": {"7": 0.5}, "b": 1, "sha256": "any"})
    True
    """
    content = json.loads(json_text({key: inner for key, inner in value.items() if key != SHA}))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value with its digest."""
    return {**value, SHA: digest_of(value)}


def is_broken(value: Mapping[str, Any]) -> bool:
    """Whether a value has a digest that is not its own."""
    return SHA in value and value[SHA] != digest_of(value)
