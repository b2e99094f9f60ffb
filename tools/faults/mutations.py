"""Faults that operators make: `<` becomes `<=`, a condition always holds, an argument is dropped, a statement deleted.

What stays: docstrings and other strings, annotations, imports, decorators, asserts, logging, the words of errors, and
blocks that only a type checker reads.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from copy import copy
from os.path import commonprefix
from textwrap import shorten

from . import Fault

PAIRS = """Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or, Add Sub, Mult Div, LShift RShift, BitAnd BitOr,
    Break Continue, min max, minimum maximum, amin amax, argmin argmax, any all, floor ceil, startswith endswith"""
SWAPS = {one: other for pair in PAIRS.split(",") for one, other in (pair.split(), pair.split()[::-1])}
FURTHER = {ast.Lt: ast.Sub, ast.LtE: ast.Add, ast.Gt: ast.Add, ast.GtE: ast.Sub}  # one off where a swap is not
CHOOSE = {"min", "max", "minimum", "maximum", "where"}  # functions that return one of their arguments
KEEP = {"len", "int", "float", "bool", "str", "list", "tuple", "dict", "set", "range", "isinstance", "print", "super"}
STAYS = (ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.pattern)
STAYING_FIELDS = {"annotation", "returns", "decorator_list", "bases", "exc", "cause"}
SILENT = re.compile(r"(log|logging|warnings)\.|__all__\b|if (TYPE_CHECKING|__name__|log)\b|['\"]")
SHOWN = 80  # characters of each of the two texts in a fault's name


def mutations(file: str, text: str, tests: str) -> list[Fault]:
    """All faults that the operators make in a file, in the order of its lines. tests: those that should catch them."""
    lines = text.encode().splitlines(keepends=True)  # bytes, as in the positions of a tree
    found, names = {}, Counter()
    for node, around, new, mutated in sorted(_mutated(ast.parse(text)), key=lambda each: each[0].lineno):
        row, end = around.lineno - 1, around.end_lineno
        first, last = row, end
        while text.count((old := b"".join(lines[first:last])).decode()) > 1:  # more lines, until they occur only once
            first, last = max(first - 1, 0), last + 1
        left = b"".join([*lines[first:row], lines[row][: around.col_offset]]).decode()
        right = b"".join([lines[end - 1][around.end_col_offset :], *lines[end:last]]).decode()
        names[name := f"{file}:{node.lineno} {_difference(ast.unparse(node), new)}"] += 1
        name += f" ({names[name]})" * (names[name] > 1)
        changed = f"{left}{mutated}{right}"
        found.setdefault((first, changed), Fault(name, file, old.decode(), changed, tests))
    return list(found.values())


def _difference(old: str, new: str) -> str:
    """What becomes what, from the word before the first difference to the word after the last."""
    words = old.split(), new.split()
    begin = max(0, len(commonprefix(words)) - 1)
    end = max(0, len(commonprefix([each[begin:][::-1] for each in words])) - 1)
    return " becomes ".join(shorten(" ".join(each[begin : len(each) - end]), SHOWN) for each in words)


def _mutated(node: ast.AST, root: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST, str, str]]:
    """Each mutation below a node: what changes, the statement or whole expression around it, what each becomes."""
    for field, value in ast.iter_fields(node):
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if field in STAYING_FIELDS or not isinstance(child, ast.AST) or isinstance(child, STAYS):
                continue
            if isinstance(child, ast.stmt) and SILENT.match(ast.unparse(child)):
                continue
            simple = isinstance(child, ast.stmt) and not {"body", "cases"}.intersection(child._fields)
            around = root or (child if simple or isinstance(child, ast.expr) else None)
            yield from _mutated(child, around)
            for new in _in_place(child, node, field):
                if ast.dump(new) == ast.dump(child):
                    continue
                setattr(node, field, _put(value, i, new) if isinstance(value, list) else new)
                mutated = ast.unparse(new if around is child else around)
                setattr(node, field, value)
                yield child, around, ast.unparse(new), mutated


def _in_place(node: ast.AST, parent: ast.AST, field: str) -> Iterator[ast.AST]:
    """What the operators put in a node's place."""
    judged = isinstance(node, ast.Compare) and not isinstance(parent, ast.BoolOp | ast.UnaryOp)
    if judged or field in ("test", "ifs", "guard"):
        yield from (ast.Constant(truth) for truth in (True, False) if not (truth and isinstance(parent, ast.While)))
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and _swapped(node.op):
        yield _with(node, op=_swapped(node.op))
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.UnaryOp():
            yield node.operand
        case ast.BinOp():
            yield from (node.left, node.right)
        case ast.BoolOp(values=values):
            some = (_put(values, i) for i in range(len(values)))
            yield from (_with(node, values=left) if len(left) > 1 else left[0] for left in some)
        case ast.Compare(ops=ops, comparators=others):
            for i, op in enumerate(ops):
                yield _with(node, ops=_put(ops, i, _swapped(op)))
                if type(op) in FURTHER and not isinstance(others[i], ast.Constant):
                    further = ast.BinOp(others[i], FURTHER[type(op)](), ast.Constant(1))
                    yield _with(node, comparators=_put(others, i, further))
            if len(ops) > 1:
                yield _with(node, ops=ops[:-1], comparators=others[:-1])
                yield ast.Compare(others[0], ops[1:], others[1:])
        case ast.Break() | ast.Continue():
            yield _swapped(node)
        case ast.Slice():
            yield from (_with(node, **{end: None}) for end in ("lower", "upper") if getattr(node, end))
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
            yield node.value
        case ast.Call():
            yield from _calls(node, isinstance(parent, ast.Expr))
        case ast.Tuple(ctx=ast.Load(), elts=[one, other]) if not isinstance(parent, ast.Subscript):
            yield _with(node, elts=[other, one])
        case ast.List(ctx=ast.Load(), elts=elts) | ast.Set(elts=elts):
            yield from (_with(node, elts=_put(elts, i)) for i in range(len(elts)) if len(elts) > 1)
        case ast.Dict(keys=keys, values=values):
            yield from (_with(node, keys=_put(keys, i), values=_put(values, i)) for i in range(len(keys)))
        case ast.AugAssign():
            yield from (ast.Assign([node.target], node.value, lineno=node.lineno), ast.Pass())
        case ast.Expr() | ast.Assign() | ast.Delete() | ast.Raise() if _deletable(node, parent):
            yield ast.Pass()
    if isinstance(node, ast.Tuple) and field in ("iter", "comparators", "type", "args"):
        yield from (_with(node, elts=_put(node.elts, i)) for i in range(len(node.elts)))


def _calls(node: ast.Call, alone: bool) -> Iterator[ast.AST]:
    """What the operators put in a call's place: another function, fewer or exchanged arguments, or one of them."""
    args, where = node.args, "attr" if isinstance(node.func, ast.Attribute) else "id"
    name = getattr(node.func, where, "")
    if name in SWAPS:
        yield _with(node, func=_with(node.func, **{where: SWAPS[name]}))
    yield from [_with(node, args=args[:-1])] if len(args) > 1 else []
    yield from (_with(node, keywords=_put(node.keywords, i)) for i in range(len(node.keywords)))
    if name not in SWAPS:  # the order of what min and max compare is nothing to them
        yield from (_with(node, args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]]) for i in range(len(args) - 1))
    if not alone and (name in CHOOSE or where == "id" and name.islower() and name not in KEEP):
        yield from (arg for arg in (args if name in CHOOSE else args[:1]) if not isinstance(arg, ast.Starred))
    chained = isinstance(getattr(node.func, "value", None), ast.Call | ast.BinOp)
    if where == "attr" and (chained or not alone and (not args or name == "to")):
        yield node.func.value


def _deletable(node: ast.stmt, parent: ast.AST) -> bool:
    """Whether to delete a statement: not if a condition that never holds does the same, or if names were undefined."""
    if isinstance(parent, ast.If) and len(parent.body) == 1 and not parent.orelse:
        return False
    targets = [each for target in getattr(node, "targets", []) for each in ast.walk(target)]
    new = {each.id for each in targets if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return not new or any(isinstance(each, ast.Name) and each.id in new for each in ast.walk(node.value))


def _swapped(op: ast.AST) -> ast.AST | None:
    return getattr(ast, SWAPS[type(op).__name__])() if type(op).__name__ in SWAPS else None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy with other fields."""
    new = copy(node)
    new.__dict__ |= fields
    return new


def _put(items: list, i: int, *new: object) -> list:
    """A copy with another item, or none, in a place."""
    return [*items[:i], *new, *items[i + 1 :]]
