"""Write docs/api.md, the reference of the names in `minillm`, from their signatures and docstrings.

python tools/list_api.py
"""

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
WIDTH = 100  # of a signature in one line
HEAD = """# API reference

What `import minillm` has. `make site` builds a reference of all modules; [the README](../README.md#use-it-as-a-library)
has examples, and [from_vllm.md](from_vllm.md) sets the API next to vLLM's. Lessons that explain a thing are named with
it.

Written by `python tools/list_api.py` from the docstrings; do not edit it.
"""


def page() -> str:
    """The text of docs/api.md."""
    import minillm
    from minillm import overrides
    from minillm.config import EngineConfig
    from minillm.engine import llm  # noqa: F401  # its rooms register the parts that can be replaced
    from minillm.request import Delta

    parts = [HEAD]
    for name in minillm.__all__:
        parts.append(described(name, getattr(minillm, name)))
        if name == "AsyncLLM":
            parts.append("## Options of an engine\n\n`LLM` and `AsyncLLM` take them as keyword arguments.\n")
            parts.append(block(EngineConfig))
        if name == "Completion":
            parts.append(described("minillm.request.Delta", Delta))
        if name == "using":
            names = ", ".join(f"`{each}`" for each in sorted(overrides.names()))
            parts.append("\n".join(textwrap.wrap(f"The parts: {names}.", 120)) + "\n")
    return "\n".join(parts)


def described(name: str, thing: Any) -> str:
    """The section of a class or a function."""
    kind = "class " if inspect.isclass(thing) else ""
    found = [f"## `{name}`\n", f"```python\n{kind}{signature(thing, name.rpartition('.')[2])}\n```\n", block(thing)]
    if not inspect.isclass(thing) or issubclass(thing, BaseException):
        return "\n".join(found)
    for own, member in vars(thing).items():
        what = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if own.startswith("_") or not inspect.isfunction(what) or not what.__doc__:
            continue
        shown = f"{own}  # a property" if isinstance(member, property) else signature(what, own)
        found += [f"### `{name.rpartition('.')[2]}.{own}`\n", f"```python\n{shown}\n```\n", block(what)]
    return "\n".join(found)


def signature(thing: Any, name: str) -> str:
    """How it is called, as its source says: the text does not depend on the version of Python."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return f"{name}({thing.__bases__[-1].__name__})"
    if hasattr(thing, "__dataclass_fields__"):
        return name  # the docstring or the fields below say what it has
    function = thing.__init__ if inspect.isclass(thing) else thing
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    words = [each for each in parameters(node.args) if each not in ("self", "cls")]
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    end = f" -> {ast.unparse(node.returns)}" if node.returns is not None and not inspect.isclass(thing) else ""
    line = f"{start}{name}({', '.join(words)}){end}"
    if len(line) <= WIDTH:
        return line
    return f"{start}{name}(\n" + "".join(f"    {each},\n" for each in words) + f"){end}"


def parameters(given: ast.arguments) -> list[str]:
    """Each parameter with its type and default."""
    found = []
    before = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(before) - len(given.defaults)) + list(given.defaults)
    for each, default in zip(before, defaults, strict=True):
        found.append(parameter(each, default))
    if given.vararg or given.kwonlyargs:
        found.append(f"*{ast.unparse(given.vararg)}" if given.vararg else "*")
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(parameter(each, default))
    return [*found, f"**{ast.unparse(given.kwarg)}"] if given.kwarg else found


def parameter(name: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(name)
    return f"{ast.unparse(name)}{' = ' if name.annotation else '='}{ast.unparse(default)}"


def block(thing: Any) -> str:
    """The docstring: its first sentence as text, the rest as it stands, since its columns are aligned."""
    first, _, rest = inspect.cleandoc(thing.__doc__).partition("\n\n")
    fields = ""
    if inspect.isclass(thing) and hasattr(thing, "__dataclass_fields__") and not rest:
        fields = "\n".join(lines_of_fields(thing))
    more = f"\n```text\n{rest.rstrip() or fields}\n```\n" if rest or fields else ""
    return f"{' '.join(first.split())}\n{more}"


def lines_of_fields(thing: type) -> list[str]:
    """The lines of a dataclass's source that declare its fields, comments included."""
    source = textwrap.dedent(inspect.getsource(thing)).split("\n")
    (node,) = ast.parse("\n".join(source)).body
    assert isinstance(node, ast.ClassDef)
    return [source[each.lineno - 1].strip() for each in node.body if isinstance(each, ast.AnnAssign)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(page().splitlines())} lines")
