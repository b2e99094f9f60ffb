"""Cut normalized text into the pieces that no token crosses.  Lesson 01."""

import regex


def split_text(text: str, pattern: regex.Pattern) -> list[str]:
    """The matches of `pattern` and what lies between them, in order: joined, they are `text`."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        start, stop = match.span()
        if start > end:
            pieces.append(text[end:start])
        if stop > start:
            pieces.append(text[start:stop])
        end = stop
    if end < len(text):
        pieces.append(text[end:])
    return pieces
