"""Chat templates: messages rendered in the format that a model was trained on.  Lesson 01."""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .patterns import TokenizerError


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's text, for training. Here its content is rendered, and the tag ignored."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's Jinja2 template, rendered in a sandbox because templates come with downloads.

    Templates have what transformers gives them: `messages`, `add_generation_prompt`, the special tokens by name,
    `raise_exception(text)`, `strftime_now(format)`, `tojson`, `break` and `continue`.  Lesson 01.
    Raises TokenizerError if the template does not parse.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TokenizerError(f"the chat template does not parse: {error}") from error

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Return the prompt for `messages`, each {"role": ..., "content": ...}.

        Raises TokenizerError for messages of another form, and with the template's own message if it rejects them.
        """
        if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
            raise TokenizerError(
                f'messages must be a list of {{"role": ..., "content": ...}}, at least one, not {messages!r}'
            )
        variables = {"tools": None, "documents": None, **self._special_tokens}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except Exception as error:  # a template is a program, which may fail in any way on messages it was not made for
            raise TokenizerError(f"the chat template rejects these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes <, > and &, which models are not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
