"""Small mistakes that somebody could make in a source file, each as another text of it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

MODULE = "<module>"
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_PAIRS = ("min max", "minimum maximum", "amin amax", "any all", "sum mean", "floor ceil", "sorted list")
_NAMES = {one: other for pair in _PAIRS for one, other in (pair.split(), pair.split()[::-1]) if one != "list"}
"""Functions and methods with a near relative."""
_SYMMETRIC = ("min", "max", "minimum", "maximum")
_TEXTS = (ast.JoinedStr, ast.List, ast.Tuple)


@dataclass(frozen=True)
class Mutant:
    """One mistake: bytes from `start` to `end` of a file become others."""

    file: str
    function: str
    """the outermost function or method it is in"""
    line: int
    kind: str
    old: str
    new: str
    number: int
    """which of several with the same texts in this function"""
    start: int
    end: int

    @property
    def id(self) -> str:
        """A name that stays while the function does, wherever it moves."""
        return f"{self.file}::{self.function}: {self.old} -> {self.new} #{self.number}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """All mistakes this knows how to make in a file."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, node in _places(tree, MODULE):
        for kind, place, new in _changes(node):
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or place.lineno) - 1] + (place.end_col_offset or 0)
            old = " ".join(source[start:end].decode().split())
            seen[function, old, new] += 1
            number = seen[function, old, new]
            found.append(Mutant(file, function, place.lineno, kind, old, new, number, start, end))
    return found


def _places(node: ast.AST, function: str, inside: str = "") -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """(function, node) of all that can be changed; annotations, docstrings and what is raised are left alone."""
    if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.JoinedStr | ast.FormattedValue):
        yield function, node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            own, around = function, inside
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and function == MODULE:
                around = f"{inside}.{child.name}".strip(".")
                own = around if isinstance(child, ast.FunctionDef) else MODULE
            yield from _places(child, own, around)


def _is_left_alone(node: ast.AST) -> bool:
    """Texts for people, types, and what only type checkers read."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "cast", "TypeVar")


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(kind, what is replaced, new text) of every mistake that begins with a node."""
    if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "condition", node.test, f"(not {_text(node.test)})"
    for kind, new in _other_texts(node):
        yield kind, node, new


def _other_texts(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            texts = [each for each in (left, right) if isinstance(each, _TEXTS) or _is_text(each)]
            if not texts:
                yield "operator", _text(ast.BinOp(left, _OPERATORS[type(op)](), right))
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _OPERATORS:
            yield "operator", ast.unparse(ast.AugAssign(target, _OPERATORS[type(op)](), value))
            yield "statement", "pass"
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            for other in _COMPARISONS[type(op)]:
                yield "comparison", _text(ast.Compare(left, [other()], comparators))
        case ast.BoolOp(op=op, values=values):
            yield "connective", _text(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", _text(operand)
        case ast.Constant(value=bool() as value):
            yield "flag", str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", repr(value + 1)
            if value:
                yield "constant", "0" if isinstance(value, int) else repr(value * 2)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield "condition", _text(ast.IfExp(test, orelse, body))
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "self"):
            yield "return", "return None"
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"
        case ast.Call(func=func, args=args, keywords=keywords):
            yield from _other_calls(func, args, keywords)
        case _:
            pass


def _other_calls(func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Iterator[tuple[str, str]]:
    name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
    plain = not any(isinstance(each, ast.Starred) for each in args) and name not in _SYMMETRIC
    if plain and len(args) > 1 and ast.dump(args[0]) != ast.dump(args[1]):
        yield "arguments", _text(ast.Call(func, [args[1], args[0], *args[2:]], keywords))
    if isinstance(func, ast.Name) and func.id in _NAMES and func.id != "sum" and not keywords:
        yield "name", _text(ast.Call(ast.Name(_NAMES[func.id]), args, keywords))
    if isinstance(func, ast.Attribute) and func.attr in _NAMES:
        yield "name", _text(ast.Call(ast.Attribute(func.value, _NAMES[func.attr]), args, keywords))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"
