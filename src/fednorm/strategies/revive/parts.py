"""Trees inside a flat tree, as programs are given it: the entries of each under a word of its own."""

from __future__ import annotations

from fednorm.core.state import Tree


def named(part: str, tree: Tree) -> Tree:
    """Entries that belong together."""
    return {f"{part}|{key}": value for key, value in tree.items()}


def unnamed(part: str, tree: Tree) -> Tree:
    """The entries that `named` gave this part."""
    start = f"{part}|"
    return {key.removeprefix(start): value for key, value in tree.items() if key.startswith(start)}
