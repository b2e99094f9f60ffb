"""`minillm models` and `minillm download`: trained models, and where they lie."""

import sys
from typing import Annotated

import typer

from .options import friendly_errors

MB = 1e6
OTHERS = """\
Any command that takes a model also takes org/name, a model of the Hugging Face Hub, and FILE.gguf, which it converts
once into the cache of models: {cache}"""


def models() -> None:
    """List the trained models that one command fetches, and whether they are on this machine."""
    from minillm import pretrained

    with friendly_errors():
        for offer in pretrained.CATALOG.values():
            print(f"{offer.name}: {offer.title}, {offer.purpose}")
            print(f"  license  {offer.license}")
            print(
                f"  size     {offer.wheel_bytes / MB:.0f} MB to download, {offer.stored_bytes / MB:.0f} MB on the disk"
            )
            print(f"  weights  rounded to {offer.rounded} in {offer.source}; the original, {offer.original}, is better")
            print(f"  here     {pretrained.downloaded(offer) or f'no: `{offer.command}`'}\n")
        print(OTHERS.format(cache=pretrained.cache_directory()))


def download(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME", help="A name that `minillm models` lists, or org/name.")
    ],
) -> None:
    """Fetch models, each into its cache.

    minillm download smollm2-135m
    """
    from minillm import pretrained

    with friendly_errors():
        for name in names:
            print(pretrained.download(name, print))


def hint_at_trained() -> None:
    """Say on stderr, for a chat with the embedded model, that a trained one is on this machine."""
    from minillm import pretrained

    if here := [offer for offer in pretrained.CATALOG.values() if pretrained.downloaded(offer)]:
        hint = f"{here[0].title} is here too: --model {here[0].name}"
        print(f"minillm: the embedded model answers; {hint}", file=sys.stderr)
