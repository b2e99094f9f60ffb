"""Prompts that begin alike share blocks, and give the same text."""

from minillm.from_vllm import LLM, SamplingParams

shared = "Once upon a time there was a lighthouse keeper on the island, and every evening the keeper went down to "
prompts = [shared + end for end in ("the river.", "the harbor.", "the wood.")]
params = SamplingParams(temperature=0, max_tokens=6)
plain = LLM("data/tiny-gemma", enable_prefix_caching=False).generate(prompts, params)
cached = LLM("data/tiny-gemma", enable_prefix_caching=True)
cached.generate(prompts[0], params)
again = cached.generate(prompts, params)
assert [each.outputs[0].text for each in again] == [each.outputs[0].text for each in plain]
assert cached.stats()["prefix_hit_tokens"] > 0
