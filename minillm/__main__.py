"""`python -m minillm` is `minillm`."""

from minillm.cli import app

app()
