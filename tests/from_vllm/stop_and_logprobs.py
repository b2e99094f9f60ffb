"""Numbers of numpy's, a stop string, and log-probabilities."""

import numpy as np

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma")
plain = llm.generate("The river", SamplingParams(temperature=0, max_tokens=np.int64(16)))[0].outputs[0]
word = plain.text.split()[2]
params = SamplingParams(temperature=np.float32(0), max_tokens=16, stop=[word], logprobs=2)
output = llm.generate("The river", params)[0].outputs[0]
assert (output.finish_reason, output.stop_reason) == ("stop", word)
assert output.text == plain.text[: plain.text.index(word)]
assert all(token in ranked for token, ranked in zip(output.token_ids, output.logprobs, strict=True))
assert all(isinstance(each.logprob, float) for ranked in output.logprobs for each in ranked.values())
