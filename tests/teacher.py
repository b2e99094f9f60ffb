"""Check outputs token by token: would the sampler choose the same token from transformers' logits?

transformers reads a finished output in one pass. Its logits go through the request's sampling parameters in float64,
with the request's own random numbers. So each token is judged independently, even after a near-tie, whatever batches,
graphs, preemptions and prefix hits produced it.
"""

from pathlib import Path

import numpy as np
import torch

from minillm import SamplingParams, ops
from minillm.model.loader import EMBEDDED
from minillm.ops import reference
from minillm.ops.signatures import Truncation
from minillm.request import Completion
from minillm.runner.sampler import Sampler
from minillm.runner.state import RowState
from minillm.scheduler.step import NewRow
from tests import models

TIE = 1e-3  # closer logits may swap, and so may the cumulative probabilities around a draw


class Teacher:
    """transformers' model in float32, on the engine's device."""

    def __init__(self, directory: Path = EMBEDDED, device: str = "cpu"):
        model = models.reference(directory, dtype="float32")
        self.model, self.device = model.to(device).eval(), device

    @torch.inference_mode()
    def logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """[output, vocab] float64 on the CPU: the logits each output token is chosen from."""
        ids = torch.tensor([prompt + output[:-1]], device=self.device)
        return self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double().cpu()

    def errors(self, completion: Completion, params: SamplingParams, seed: int) -> int:
        """The number of tokens that differ from what the parameters choose, not counting ties."""
        output = completion.token_ids
        if not output:
            return 0
        logits = self.logits(completion.prompt_token_ids, output)
        count, start = len(output), len(completion.prompt_token_ids)
        state = RowState(1, start + count, 1, 1, start + count, torch.device("cpu"))
        known = np.array(completion.prompt_token_ids + output, np.int32)
        state.fill([NewRow(0, known, start, params, seed, tuple(params.stop_token_ids))])
        rows, lengths = np.zeros(count, np.int64), np.arange(start, start + count)
        shaped = logits.clone()
        for stage in Sampler.STAGES if params.adjusts_logits else ():
            shaped = stage(Sampler(state, ops.on("cpu")), shaped, rows, lengths)
        chosen = torch.tensor(output)
        if params.temperature == 0:
            gap = shaped.amax(-1) - shaped.gather(1, chosen[:, None])[:, 0]
            return int((gap > TIE).sum())
        min_p, top_k, top_p = torch.from_numpy(state.sampling.of([0]))[:, 1:].expand(count, -1).unbind(1)
        kept = reference.truncate(shaped / params.temperature, Truncation(min_p, top_k.int(), top_p))
        lower, upper = interval(kept.softmax(-1), chosen)
        draws = torch.from_numpy(uniforms_of(seed, lengths)).double()
        return int(((draws < lower - TIE) | (draws > upper + TIE)).sum())


def uniforms_of(seed: int, lengths: np.ndarray) -> np.ndarray:
    from minillm.runner.sampler import uniforms
    from minillm.runner.sampling_columns import mix

    return uniforms(mix(np.full(len(lengths), seed, np.int64).astype(np.uint64)), lengths)


def interval(chances: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The interval of [0, 1], with tokens in id order, in which a draw chooses each token."""
    upper = chances.cumsum(-1).gather(1, chosen[:, None])[:, 0]
    return upper - chances.gather(1, chosen[:, None])[:, 0], upper
