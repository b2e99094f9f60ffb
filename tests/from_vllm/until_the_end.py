"""max_tokens=None fills the context."""

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma", max_model_len=64)
whole = llm.generate("Once upon a time", SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))[0]
assert len(whole.prompt_token_ids) + len(whole.outputs[0].token_ids) == 64
assert whole.outputs[0].finish_reason == "length"
