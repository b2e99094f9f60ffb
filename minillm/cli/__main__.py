"""`python -m minillm.cli` is `minillm`."""

from . import app

app()
