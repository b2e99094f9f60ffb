"""Compile and capture what the first requests need, before they come."""

from typing import TYPE_CHECKING

from minillm.request import RequestOptions, SamplingParams

from .adapters import some_adapter
from .recent import Recent

if TYPE_CHECKING:
    from .engine import Engine


def warm_up(self: "Engine") -> None:
    """Compile kernels and capture CUDA graphs before the first request. On a CPU it does nothing.

    Captures every batch size with block tables of the smallest width, and every shape with prompts. Then it runs
    prompts up to the token budget, and again with an adapter, if requests may have one. Wider tables and the general
    sampler are compiled when first used.
    """
    if not self.facts.captures:
        return
    with self.lock:
        self.executor.warm_up()
        with some_adapter(self) as name:
            for adapter in dict.fromkeys((None, name)):
                _run_prompts(self, RequestOptions(use_prefix_cache=False, adapter=adapter))
        self.first_waits = Recent()


def _run_prompts(self: "Engine", options: RequestOptions) -> None:
    """Run prompts up to the token budget, of which each step takes as many as it can."""
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    fitting = self.facts.num_blocks // self.scheduler.tables.groups * self.config.block_size
    longest = min(128, self.max_model_len - 2, fitting - 2)
    total = 1
    while total <= self.config.max_num_batched_tokens and longest > 0:
        length = min(total, longest)
        for _ in range(min(total // length, self.config.max_num_seqs)):
            self.submit(self.prepare([0] * length, params, options, wants_text=False))
        while self.has_work:
            self.step()
        total *= 4
