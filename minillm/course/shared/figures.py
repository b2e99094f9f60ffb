"""Figures with a text alternative, for people who cannot see them and for places that show no pictures.  Lesson 00."""

import io
import sys

from minillm.errors import ConfigError


def describe(text: str) -> None:
    """Show the current matplotlib figure, and `text` where pictures are not shown. Raises ConfigError without a figure.

    text: what the figure shows, in a sentence or two that also hold for figures measured on another machine.
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
    words = " ".join(text.split())
    # nbconvert and GitHub read `alt`, VS Code reads `vscode_altText`; JupyterLab shows only the text/plain of a figure
    # that it cannot draw.
    metadata = {"image/png": {"alt": words}, "vscode_altText": words}
    display({"image/png": buffer.getvalue(), "text/plain": words}, metadata=metadata, raw=True)
