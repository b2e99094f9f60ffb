"""The version, which packaging reads as text."""

__version__ = "0.1.0"
