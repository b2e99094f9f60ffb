"""What a packed step says of its rows."""

import pytest

from minillm import LLM, SamplingParams
from minillm.ops.compositions import Compositions

pytestmark = pytest.mark.key


def test_the_last_rows_without_earlier_keys_are_counted(monkeypatch):
    seen = []
    own = Compositions.prompt_attention

    def spied(self, q, k, v, cache, rows, options):
        lengths, starts = rows.lengths.tolist(), rows.query_start.tolist()
        fresh = [length == after - start for length, start, after in zip(lengths, starts, starts[1:], strict=False)]
        seen.append((rows.whole, fresh))
        return own(self, q, k, v, cache, rows, options)

    monkeypatch.setattr(Compositions, "prompt_attention", spied)
    prompts = [[5 + i] * count for i, count in enumerate((30, 3, 9, 41, 2))]
    with LLM(device="cpu", max_num_batched_tokens=32, block_size=4) as llm:
        llm.generate([*prompts, prompts[3], [50] * 7], SamplingParams(max_tokens=3, temperature=0))
    for whole, fresh in seen:
        assert all(fresh[len(fresh) - whole :]) and not (fresh[: len(fresh) - whole] or [False])[-1]
    assert {whole for whole, _ in seen} >= {0, 2} and any(whole < len(fresh) for whole, fresh in seen if whole)
