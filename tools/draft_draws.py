"""How often a draft model's token equals the model's, by how a random number becomes a token.

    python tools/draft_draws.py DRAFT --record draft-draws

Nothing is sampled for it: from what both models predict after the same tokens (p of the model, q of the draft), the
chance that both draw the same token follows exactly. The ways:

likeliest    the draft is q's likeliest token, and the model draws from p
independent  each draws with a number of its own
inverse      both invert their cumulative distribution at the same number, as the engine does
gumbel       both take the largest log-probability plus Gumbel noise, the noise of a token being the same for both
             (Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding")
most         the bound of all ways, which rejection sampling reaches: sum of min(p, q)
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from minillm import LLM, SamplingParams  # noqa: E402
from minillm.bench import records  # noqa: E402
from minillm.calibration.forward import hidden_states  # noqa: E402
from tools.speculation_speed import STORIES  # noqa: E402

LIKELIEST = 400  # tokens of either model that the noise is computed for; the others are taken to agree never


def chances(p: Tensor, q: Tensor) -> dict[str, Tensor]:
    """The chance that both draw the same token, by each way: [positions]. p, q: [positions, vocab], float64."""
    ends, own_ends = p.cumsum(-1), q.cumsum(-1)
    overlap = torch.minimum(ends, own_ends) - torch.maximum(ends - p, own_ends - q)
    kept = torch.maximum(p, q).topk(min(LIKELIEST, p.shape[-1])).indices
    return {
        "likeliest": p.gather(-1, q.argmax(-1, keepdim=True))[:, 0],
        "independent": (p * q).sum(-1),
        "inverse": overlap.clamp(min=0).sum(-1),
        "gumbel": torch.stack([_gumbel(*each) for each in zip(p.gather(-1, kept), q.gather(-1, kept), strict=True)]),
        "most": torch.minimum(p, q).sum(-1),
    }


def _gumbel(p: Tensor, q: Tensor) -> Tensor:
    """Token x is the first of both races with the chance 1 / sum over y of max(p_y / p_x, q_y / q_x); their sum."""
    both = (p > 0) & (q > 0)
    ratio = torch.maximum(p[None, :] / p[both, None], q[None, :] / q[both, None])
    return (1 / ratio.sum(-1)).sum()


@torch.inference_mode()
def measured(model: str | None, draft: str, temperature: float, tokens: int) -> dict:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3, ignore_eos=True)
    found: dict[str, list[Tensor]] = {}
    with LLM(model, speculate=draft, device="cpu", dtype="float32") as llm:
        small = llm.engine.draft_model.executor.runner.model
        for done in llm.generate(STORIES, params):
            prompt = len(done.prompt_token_ids)
            row = torch.tensor([[*done.prompt_token_ids, *done.outputs[0].token_ids]])
            p, q = (
                (each.logits(hidden_states(each, row)[prompt - 1 : -1]).double() / temperature).softmax(-1)
                for each in (llm.engine.model, small)
            )
            for way, each in chances(p, q).items():
                found.setdefault(way, []).append(each)
    shares = {way: round(torch.cat(each).mean().item(), 4) for way, each in found.items()}
    positions = sum(len(each) for each in found["most"])
    return {"temperature": temperature, "positions": positions, "agreement": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="a draft model's directory")
    parser.add_argument("--model", help="default: tiny-gemma")
    parser.add_argument("--tokens", type=int, default=160, help="of each text")
    parser.add_argument("--record", metavar="NAME", help="write a record of this name")
    options = parser.parse_args()
    begun, results = records.begin(options.record), []
    for temperature in (0.5, 0.7, 1.0, 1.5):
        results.append(measured(options.model, options.draft, temperature, options.tokens))
        print(json.dumps(results[-1]), flush=True)
    if options.record:
        records.write(records.record(results, begun), options.record)


if __name__ == "__main__":
    main()
