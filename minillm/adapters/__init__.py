"""Adapters: small corrections of a model's matrices, of which each request of a batch may have another.  Lesson 15.

    LLM(MODEL, adapters={"pirate": "adapters/pirate"}).generate("The sea", adapter="pirate")

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models": an adapter adds the product of two thin matrices,
B A, to a matrix W. It is never merged into W: each token's output gets B (A x) of its own request's adapter, so a batch
may hold any of them, and the model's weights are there once (Sheng et al. 2023, "S-LoRA", section 3).

Files of adapters, and their factors on the device, belong here. The product does not (`ops`, `kernels`), and neither do
the names that are loaded (`engine.adapters`), the choice of who gets a slot (`scheduler.slot_ledger`), and what may
share cached prefixes (`request`).
"""
