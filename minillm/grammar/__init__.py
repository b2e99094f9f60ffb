"""Structured output: the tokens that may come next in a text that follows a JSON schema or an expression.  Lesson 02.

What a text may contain belongs here. When a request ends does not (`scheduler`).

The `llguidance` library follows the grammar. This package gives it the tokens' bytes (`vocabulary`), prepares schemas
and says what is wrong with them (`schema`), and bounds its work (`matcher`).
"""

from .matcher import MAX_GRAMMAR, Grammars, Matcher

__all__ = ["MAX_GRAMMAR", "Grammars", "Matcher"]
