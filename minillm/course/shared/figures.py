"""Figures with a caption that says what they show, for all readers, those who cannot see them included.  Lesson 00."""

import html
import io
import re
import sys

from minillm.errors import ConfigError

# What a screen reader says of the picture itself. It reads the caption next, so the words are not here, too.
ALTERNATIVE = "A figure, described by the text below it"


def describe(text: str) -> None:
    """Show the current matplotlib figure, and `text` below it. Raises ConfigError without a figure.

    text: what the figure shows, in a sentence or two that also hold for figures measured on another machine. Names of
    code stand between backticks.
    """
    import matplotlib.pyplot as plt

    if not plt.get_fignums():
        raise ConfigError("there is no figure to describe: draw one first, in the same cell")
    figure = plt.gcf()
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:  # a lesson that runs as a script
        plt.close(figure)
        return
    from IPython.display import display

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    plt.close(figure)
    # nbconvert and GitHub read `alt`, VS Code reads `vscode_altText`.
    metadata = {"image/png": {"alt": ALTERNATIVE}, "vscode_altText": ALTERNATIVE}
    display({"image/png": buffer.getvalue(), "text/plain": ALTERNATIVE}, metadata=metadata, raw=True)
    display(caption(text), raw=True)


def caption(text: str) -> dict[str, str]:
    """The text below a figure by MIME type."""
    words = " ".join(text.split())
    marked = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(words))
    return {"text/html": f"<p>{marked}</p>", "text/plain": words}
