"""Prompts that are not text: embeddings, as rows of a batch.

What turns embeddings into positions of a prompt, checks them and hashes them belongs here. Where a step reads them does
not (`runner`), nor do the forms in which requests arrive (`engine`, `server`).
"""

from .embeddings import EMBEDDED, EmbeddedPrompt, Embeddings

__all__ = ["EMBEDDED", "EmbeddedPrompt", "Embeddings"]
