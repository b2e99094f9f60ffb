"""JSON schemas: what is refused and why, and what is changed before the library compiles them.  Lesson 02.

`llguidance` says what is wrong with a schema, but not where. Here each refusal names the part as a JSON pointer
(RFC 6901) and a way out. Parts of a schema are called by their pointers: "#/properties/name".
"""

import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from decimal import Decimal
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeGuard
from urllib.parse import quote, unquote, urldefrag, urljoin

from minillm.errors import InvalidRequest

Part = Any  # a schema in a schema: a dictionary, True or False
LARGEST = 2**53 - 1  # many readers of JSON round larger integers (RFC 8259, section 6)
_TOO_LARGE = f"many readers of JSON round integers beyond {LARGEST:,}, so none are generated"
MOST_MULTIPLE = 10_000  # compiling a number's multiples takes time in proportion to it, and no other limit bounds it
MOST_PATTERNS = 100  # the library compares each with each
MOST_NAMES = 10_000  # objects with patterns times names
# Between the parts of a JSON text: one space after a colon and after a comma, or none. Most models write the space, as
# Python's json does, and compact JSON comes without. More room, such as for line breaks, small models fill until
# max_tokens.
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": False}
MOST_CHARACTERS = 1 << 14  # of an expression: some take time with the square of them, 0.8 s with as many as this
MOST_NESTED = 250  # groups inside each other, the library's own limit, which it reaches late if they never end
SEARCH = 0.5  # seconds of CPU to find the part that is refused, by compiling parts: most take 0.3 ms
QUOTED = 200  # characters of the library's messages, which may quote the schema

# The keywords whose value is a schema, a list of schemas, or a dictionary of schemas by names of the user's own.
_ONE_OR_MORE = (
    *("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties"),
    *("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"),
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# With these an object has members that its own `properties` do not list.
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_CONDITIONS = ("not", "if", "dependentSchemas")
_OTHERS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def refusal(pointer: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"json_schema cannot be used: at {pointer}: {why}")


# ---- the parts of a schema


def step(pointer: str, *names: object) -> str:
    return "/".join([pointer, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def _fragment(schema: Part, reference: str) -> str | None:
    """Return the "#..." of a reference to the schema itself, which may call it by its $id; None: it names another
    document.
    """
    if reference.startswith("#"):
        return reference
    own = schema.get("$id", "")
    try:
        base = urldefrag(own).url if isinstance(own, str) else ""
        document, fragment = urldefrag(urljoin(base, reference))
    except ValueError:  # one of them is no URL
        return None
    return "#" + fragment if document == base else None


def target(schema: Part, reference: Any) -> tuple[str, Part] | None:
    """Return the part of `schema` that a reference names; None: it names none, or not by its place."""
    reference = _fragment(schema, reference) if isinstance(reference, str) else None
    if reference is None or not (reference == "#" or reference.startswith("#/")):
        return None
    pointer, part = "#", schema
    for each in reference.split("/")[1:]:
        name = unquote(each).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            name = str(int(name))
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
        pointer = step(pointer, name)
    return pointer, part


def children(schema: Part, pointer: str, part: Part) -> Iterator[tuple[str, Part]]:
    """Yield the parts just below one, and the one that its $ref names."""
    if not isinstance(part, dict):
        return
    for keyword, value in part.items():
        if keyword in _NAMED and isinstance(value, dict):
            yield from ((step(pointer, keyword, name), each) for name, each in value.items())
        elif keyword in _ONE_OR_MORE and isinstance(value, list):
            yield from ((step(pointer, keyword, n), each) for n, each in enumerate(value))
        elif keyword in _ONE_OR_MORE:
            yield step(pointer, keyword), value
    if referred := target(schema, part.get("$ref")):
        yield referred


def parts(schema: Part) -> dict[str, dict[str, Any]]:
    """Return the dictionaries among the parts of a schema, by their pointers."""
    by_pointer: dict[str, dict[str, Any]] = {}
    left = [("#", schema)]
    while left:
        pointer, part = left.pop()
        if isinstance(part, dict) and pointer not in by_pointer:
            by_pointer[pointer] = part
            left += children(schema, pointer, part)
    return by_pointer


# ---- what is checked and changed


def prepared(schema: Part, library: Any) -> Part:
    """Return the schema as the library is to compile it; changed in place. Raises InvalidRequest."""
    _check_multiples(schema)
    by_pointer = parts(schema)
    _check_expressions(by_pointer)
    _check_references(schema, by_pointer)
    _check_cycles(schema, by_pointer)
    _settle_patterns(by_pointer, library)
    by_pointer = parts(schema)
    whole = any("integer" in _types(part) for part in by_pointer.values())
    for pointer, part in by_pointer.items():
        _check_values(pointer, {name: part[name] for name in ("const", "enum") if name in part}, whole)
        _check_bounds(pointer, part)
    close(by_pointer.values())
    return schema


def is_deep(expression: str) -> bool:
    """Return whether a regular expression has more than `MOST_NESTED` groups or sets of characters in each other."""
    groups = sets = 0
    for match in re.finditer(r"\\.|[][()]", expression, re.DOTALL):
        if match[0] == "[":
            sets += 1
        elif match[0] == "]":
            sets = max(0, sets - 1)
        elif match[0] in "()" and not sets:
            groups = max(0, groups + (1 if match[0] == "(" else -1))
        if groups + sets > MOST_NESTED:
            return True
    return False


def _check_expressions(by_pointer: dict[str, dict[str, Any]]) -> None:
    for pointer, part in by_pointer.items():
        named = part.get("patternProperties")
        for each in (part.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(each, str) and (why := too_large(each)):
                raise refusal(pointer, f"the pattern {why}")


def too_large(expression: str) -> str | None:
    """Say what about an expression exceeds a limit; None if nothing does."""
    if len(expression) > MOST_CHARACTERS:
        return f"has {len(expression):,} characters, but at most {MOST_CHARACTERS:,} are allowed"
    return f"is nested too deeply: at most {MOST_NESTED} groups in each other" if is_deep(expression) else None


def _check_references(schema: Part, by_pointer: dict[str, dict[str, Any]]) -> None:
    """Refuse references to what is not among the parts: the library may find it, but nothing was checked there."""
    anchors = {
        f"#{part[name]}" for part in by_pointer.values() for name in ("$anchor", "$dynamicAnchor") if name in part
    }
    anchors |= {part[name] for part in by_pointer.values() for name in ("$id", "id") if isinstance(part.get(name), str)}
    bases = [pointer for pointer, part in by_pointer.items() if pointer != "#" and _is_base(part)]
    for pointer, part in by_pointer.items():
        if not isinstance(reference := part.get("$ref"), str):
            continue
        fragment = _fragment(schema, reference)
        if fragment is None or any(f"{pointer}/".startswith(f"{base}/") for base in bases):
            raise refusal(pointer, "a $ref names another document: put it under $defs, and refer to #/$defs/...")
        if fragment not in anchors and target(schema, fragment) is None:
            raise refusal(pointer, f"a $ref names {fragment[1:]!r}, which does not exist: put it under $defs")


def _is_base(part: dict[str, Any]) -> bool:
    """Return whether references in this part count from it, as from a document of its own."""
    return any(isinstance(part.get(name), str) and not part[name].startswith("#") for name in ("$id", "id"))


def _types(part: dict[str, Any]) -> list[Any]:
    kinds = part.get("type", "number")
    return kinds if isinstance(kinds, list) else [kinds]


def _check_values(pointer: str, value: Any, whole: bool) -> None:
    """Refuse integers that not all readers read exactly. whole: some number is to be an integer, so 1e20 may be one."""
    left = [(pointer, value)]
    while left:
        pointer, value = left.pop()
        if isinstance(value, (dict, list)):
            left += [(step(pointer, name), each) for name, each in _members(value)]
        elif _number(value) and abs(value) > LARGEST and (whole or isinstance(value, int)):
            raise refusal(pointer, f"{_TOO_LARGE}: make it a string")


def _members(value: dict[str, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_bounds(pointer: str, part: dict[str, Any]) -> None:
    """Tighten bounds to the numbers that all readers of JSON read exactly; refuse those that leave none of these, and
    bounds that the library does not keep."""
    kinds = _types(part)
    if "number" not in kinds and "integer" not in kinds:
        return
    for end, sign in (("inimum", 1), ("aximum", -1)):
        for name, most in ((f"m{end}", LARGEST), (f"exclusiveM{end}", LARGEST - 1)):
            if _number(value := part.get(name)) and value * sign > most:
                raise refusal(step(pointer, name), f"{_TOO_LARGE}: ask for a string of digits")
            if _number(value):
                part[name] = sign * max(value * sign, -LARGEST)
    for end, other, sign in (("inimum", "aximum", 1), ("aximum", "inimum", -1)):
        # The library gives 0 where a number is to be more than 0 and less than 0.5, and so with other whole numbers.
        name, bounds = f"exclusiveM{end}", [part.get(f"m{other}"), part.get(f"exclusiveM{other}")]
        bound, others = part.get(name), [sign * each for each in bounds if _number(each)]
        if bound is True:
            bound = part.get(f"m{end}")
        if "integer" in kinds or not _number(bound) or bound != int(bound) or sign * bound < 0 or not others:
            continue
        if sign * bound < min(others) < sign * bound + 1:
            raise refusal(
                step(pointer, name),
                f"{bound} itself cannot be left out if all numbers are less than 1 from it: use m{end} with the number "
                "nearest to it that you want",
            )


def _settle_patterns(by_pointer: dict[str, dict[str, Any]], library: Any) -> None:
    """Give the schemas of patternProperties to the properties that an object lists, if they match no other names.

    The library would allow a comma after the listed ones, and then find no name that may follow.
    """
    patterned = {
        pointer: part for pointer, part in by_pointer.items() if isinstance(part.get("patternProperties"), dict)
    }
    everywhere = list({name: None for part in by_pointer.values() for name in _names(part)})
    count = sum(len(part["patternProperties"]) for part in patterned.values())
    if count > MOST_PATTERNS or len(patterned) * len(everywhere) > MOST_NAMES:
        raise refusal(
            next(iter(patterned)),
            f"patternProperties may have {MOST_PATTERNS} patterns in a schema, and objects with them times all names "
            f"of properties may be {MOST_NAMES:,}: leave some out",
        )
    combines = any(map(_combines, by_pointer.values()))
    for pointer, part in patterned.items():
        patterns, names = part["patternProperties"], _names(part)
        others = part.get("additionalProperties", True)
        if names and not _takes_more(names, patterns, others is not False, library):
            listed = part["properties"] if isinstance(part.get("properties"), dict) else {}
            matching: dict[str, list[Part]] = {name: [] for name in names}
            for pattern, each in patterns.items():
                only = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
                for name in _accepted(only, ["{" + _quoted(name) + ":" for name in names], library):
                    matching[names[name]].append(each)
            part["properties"] = {
                name: {"allOf": [listed.get(name, True), *matching[name]]}
                if matching[name]
                else listed.get(name, others)
                for name in names
            }
            part["additionalProperties"] = False
            del part["patternProperties"]
        elif patterns and combines and not _takes_more(everywhere, patterns, False, library):
            raise refusal(
                step(pointer, "patternProperties"),
                "in a schema with allOf, anyOf, oneOf or $ref next to properties, patterns must match more than names "
                "that properties lists: put their schemas into properties",
            )


def _names(part: dict[str, Any]) -> list[str]:
    listed = part.get("properties")
    return [*dict.fromkeys([*(listed if isinstance(listed, dict) else ()), *_required(part)])]


def _takes_more(names: list[str], patterns: dict[str, Part], others: bool, library: Any) -> bool:
    """Return whether the library allows another name in an object with these names; True if it refuses to say."""
    probe = {
        "type": "object",
        "properties": dict.fromkeys(names, {"const": 0}),
        "required": names,
        "patternProperties": {pattern: each is not False for pattern, each in patterns.items()},
        "additionalProperties": others,
    }
    text = "{" + "".join(f"{_quoted(name)}:0," for name in names) + '"'
    return _accepted(probe, [text], library) != []


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _accepted(schema: Part, texts: list[str], library: Any) -> list[int]:
    """Return which texts begin a value of the schema, by number: all of them if the library refuses the schema."""
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar(schema, library), log_level=0)  # a token is a byte
    data = [list(text.encode()) for text in texts]
    return [n for n, each in enumerate(data) if matcher.is_error() or matcher.validate_tokens(each) == len(each)]


def close(dictionaries: Collection[dict[str, Any]]) -> None:
    """Let objects whose schema lists properties and says nothing of others have only these and the required ones, as
    vLLM does.

    JSON Schema itself allows any, with which a model may go on as long as it likes. A schema that combines several for
    one object is left as it is.
    """
    if any(map(_combines, dictionaries)):
        return
    for part in dictionaries:
        listed = part.get("properties")
        if isinstance(listed, dict) and not any(name in part for name in _OTHERS):
            for name in _required(part):
                listed.setdefault(name, True)
            part["additionalProperties"] = False


def _combines(schema: dict[str, Any]) -> bool:
    """Return whether several schemas hold for the same object."""
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    more = "properties" in schema and any(name in schema for name in _COMBINED)
    return several or more or any(name in schema for name in _CONDITIONS)


def _required(part: dict[str, Any]) -> list[str]:
    names = part.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _check_multiples(schema: Part) -> None:
    """Refuse a `multipleOf` that would take long to compile. Several may hold for the same number."""
    least, left = 1, [("#", schema)]
    while left:
        pointer, part = left.pop()
        if isinstance(part, (dict, list)):
            left += [(step(pointer, name), each) for name, each in _members(part)]
        if isinstance(part, dict):
            number = part.get("multipleOf")
            if _number(number) and number > 0:
                exact = Decimal(str(number)).normalize()
                least = math.lcm(least, int(exact.scaleb(max(0, -int(exact.as_tuple().exponent)))))
                if least > MOST_MULTIPLE:
                    raise refusal(
                        step(pointer, "multipleOf"),
                        "the least common multiple of all multipleOf of the schema, without their decimal points, is "
                        f"above {MOST_MULTIPLE:,}: leave some out and check the numbers yourself",
                    )


def _check_cycles(schema: Part, by_pointer: dict[str, dict[str, Any]]) -> None:
    """Refuse a part that is defined by itself, and one whose values contain each other without end."""
    same: dict[str, list[str]] = {}  # the parts that hold for the same value
    needed: dict[str, list[str]] = {}  # the parts that each value needs
    for pointer, part in by_pointer.items():
        options = {name: part[name] for name in ("allOf", "anyOf", "oneOf") if isinstance(part.get(name), list)}
        same[pointer] = [step(pointer, name, n) for name, each in options.items() for n in range(len(each))]
        needed[pointer] = [
            step(pointer, name, n)
            for name, each in options.items()
            for n in range(len(each))
            if name == "allOf" or len(each) == 1
        ]
        if referred := target(schema, part.get("$ref")):
            same[pointer].append(referred[0])
            needed[pointer].append(referred[0])
        needed[pointer] += _contents(pointer, part)
    for graph, why in (
        (same, "its $ref leads back to itself, which says nothing: refer to it from a property or an item instead"),
        (needed, "each value needs another one inside, without end: make a property optional, or allow null (anyOf)"),
    ):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = error.args[1][::-1]
            raise refusal(cycle[0], f"{why} ({' -> '.join(cycle)})"[: QUOTED * 2]) from None


def _contents(pointer: str, part: dict[str, Any]) -> list[str]:
    """Return the parts of what every value of this type contains."""
    kind = part.get("type")
    if kind in ("object", ["object"]):
        listed = part.get("properties")
        known = listed if isinstance(listed, dict) else ()
        return [step(pointer, "properties", name) for name in _required(part) if name in known]
    least = part.get("minItems", 0)
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        first = part.get("prefixItems")
        count = len(first) if isinstance(first, list) else 0
        items = [step(pointer, "items")] if least > count and "items" in part else []
        return [step(pointer, "prefixItems", n) for n in range(min(least, count))] + items
    return []


# ---- what the library is given, and what it says


def grammar(schema: Part, library: Any) -> str:
    """Return the library's grammar for a schema. Raises ValueError."""
    with_options = schema | {"x-guidance": OPTIONS} if isinstance(schema, dict) else schema
    return str(library.LLMatcher.grammar_from_json_schema(json.dumps(with_options)))


_WORDS = (
    (r"Unimplemented keys: \[(.*)\]", r"\1 cannot be followed: leave it out, and check the value yourself"),
    (r"Unknown format: (.*)", r"the format \1 is not known: leave it out, or use a pattern"),
    (r"oneOf constraints are not supported", "oneOf needs options of different types or constants: use anyOf"),
    (r"(patternProperty regexes .* not disjoint)", r"\1: let each name match one of them at most"),
    (r"circular references with sibling", "$ref leads back here with keywords next to it: move them to what it names"),
    (r"Resource .* not present", "a $ref names another document: put it under $defs, and refer to #/$defs/..."),
    (r"(?:Pointer|Anchor) (.*) does not exist", r"a $ref names \1, which does not exist: put it under $defs"),
    (r"(min/maxProperties) only", r"\1 needs all listed properties to be required: leave it out, or require them"),
    (r"recursion limit exceeded", "it is nested too deeply: put parts under $defs, and refer to them"),
    (r"regex parse error:.*error: (.*)", r"the pattern cannot be read: \1"),
    (r"anyOf is empty", "no value is possible: an enum, a type or an anyOf is an empty list"),
    (r"Regex is empty", "no value is possible: no text has this pattern, format and length"),
    (r"required property ('.*') is", r"no value is possible: \1 is required, and nothing can be its value"),
    (r"Unsatisfiable schema: (.*)", r"no value is possible: \1"),
)


def blame(schema: Part, why: str, refused: Callable[[Part], str | None]) -> InvalidRequest:
    """Return the refusal of a schema that the library does not take, which names the innermost part that it does not
    take.

    why: what the library said of the whole. refused: what it says of another schema, None if it takes it.
    """
    named = not any("$id" in part or "id" in part for part in parts(schema).values())  # or else references differ
    fixed = {"$defs": {"whole": _moved(schema)}} | {name: schema[name] for name in ("$schema",) if name in schema}

    def says(pointer: str) -> str | None:
        return refused({"$ref": "#/$defs/whole" + quote(pointer[1:], safe="/~")} | fixed) if named else None

    pointer, part, seen, end = "#", schema, {"#"}, time.thread_time() + SEARCH
    why = says("#") or why
    while True:
        missing = re.search(r"required property '(.*)' is unsatisfiable", why)
        for below, each in children(schema, pointer, part):
            if below in seen or time.thread_time() > end:
                continue
            seen.add(below)
            said = says(below)
            if said and (said == why or (missing and below == step(pointer, "properties", missing[1]))):
                pointer, part, why = below, each, said
                break
        else:
            return refusal(pointer, _in_our_words(why))


def _moved(schema: Part) -> Part:
    """Return a copy whose references hold when it stands under #/$defs/whole."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            part["$ref"] = "#/$defs/whole" + reference[1:]
        return part

    return json.loads(json.dumps(schema), object_hook=move)


def _in_our_words(why: str) -> str:
    why = why.replace("#/$defs/whole", "#").replace("/$defs/whole", "")
    for pattern, words in _WORDS:
        if match := re.search(pattern, why):
            return match.expand(words)[:QUOTED]
    return f"{why[:QUOTED]}: change this part, or leave it out and check the value yourself"


def literals(schema: Part) -> Iterator[tuple[str, str]]:
    """Yield the texts that a value may have to contain: names and constants, as JSON. With each, the part that has
    it.
    """
    for pointer, part in parts(schema).items():
        for value in (*_names(part), part.get("const"), part.get("enum")):
            yield pointer, json.dumps(value, ensure_ascii=False)
