"""A report as one HTML page that loads nothing: styles, pictures and formulas are in it."""

from collections.abc import Mapping
from typing import Any

from . import sections

# Term -> what it is, and its formula in LaTeX, if it has one.
TERMS: dict[str, tuple[str, str]] = {
    "Accuracy": (
        "The share of questions for which the model finds the right answer's letter the most likely of the four.",
        r"\text{accuracy} = \frac{\text{right answers}}{\text{questions}}",
    ),
    "Points lost": (
        "The difference of two accuracies on the same questions, times a hundred. b questions were answered correctly "
        "only by the original, c only by the version; all others say nothing about the difference.",
        r"\text{points lost} = 100 \cdot \frac{b - c}{n}",
    ),
    "KL divergence": (
        "How far a version's predictions q are from those p of the original in float32: the mean over all N positions "
        "of a text, in nats. 0 means the same predictions. It sees every small change, also those that change no "
        "answer.",
        r"\text{KL} = \frac{1}{N} \sum_{i=1}^{N} \sum_{t} p_i(t) \log \frac{p_i(t)}{q_i(t)}",
    ),
    "Perplexity": (
        "How surprised the model is by a text that it was not trained on. 5 means: as surprised as if it chose among 5 "
        "equally likely tokens at every position. Lower is better, for the same text and the same tokens.",
        r"\text{perplexity} = \exp \left( -\frac{1}{N} \sum_{i=1}^{N} \log p_i(t_i) \right)",
    ),
    "Token": ("A word or a piece of one. Models read and write tokens, and providers charge for them.", ""),
    "Cache": (
        "Keys and values that the model keeps for every token of a running request, so that it need not compute them "
        "again. H are the heads that have keys and values, d the numbers in each.",
        r"\text{bytes a token} = 2 \cdot \text{layers} \cdot H \cdot d \cdot \text{bytes of a number}",
    ),
    "Cost": (
        "Dollars for a million tokens, from the price of an hour and the tokens generated per second. A machine that "
        "waits costs as much as one that works, so this is the cost while the load lasts.",
        r"\text{dollars a million} = \frac{\text{dollars an hour}}{3600 \cdot \text{tokens/s}} \cdot 10^6",
    ),
}

SETTINGS = {
    "versions": "versions asked for",
    "task": "questions from",
    "limit": "most questions",
    "tokens": "tokens of text read for KL and perplexity",
    "scale": "lengths of requests divided by",
    "requests": "requests at once, without a server",
    "repeat": "timed runs of each",
    "clients": "clients of the server",
    "sent": "requests of each pattern",
    "served": "versions to serve",
    "price": "dollars an hour",
}
ABSENT = {"versions": "all methods", "served": "the unquantized one", "price": "not given"}


def render(record: Mapping[str, Any]) -> str:
    """Return the page of a record of `minillm report`. Everything that it says comes from the record."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("minillm", "report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    every = sections.sections(record)
    return environment.get_template("page.html").render(
        record=record,
        sections=every,
        summary=sections.summary(record, every),
        settings=[(words, _shown(name, record["settings"][name])) for name, words in SETTINGS.items()],
        terms=[(name, text, _mathml(formula)) for name, (text, formula) in TERMS.items()],
    )


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ABSENT.get(name, "all")
    return ", ".join(value) if isinstance(value, (list, tuple)) else str(value)


def _mathml(formula: str) -> str:
    from latex2mathml.converter import convert

    return convert(formula, display="block") if formula else ""
