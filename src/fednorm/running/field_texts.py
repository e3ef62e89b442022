"""The string under each field of a class, which is its help text on the command line and on generated pages."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def field_texts(module: ModuleType) -> dict[str, dict[str, str]]:
    """The text under each annotated field, by class and field; a class keeps no trace of them at run time."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, ast.ClassDef):
            found = texts.setdefault(node.name, {})
            for item, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    text = getattr(getattr(following, "value", None), "value", None)
                    if isinstance(text, str):
                        found[item.target.id] = text
    return texts
