"""Set before any test module is imported."""

import os

import torch

# Triton decides when it is first imported whether kernels are interpreted, and transformers imports it on the way.
# Without a GPU interpreting is the only way to run a kernel, so nothing that could run otherwise is slowed down.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
