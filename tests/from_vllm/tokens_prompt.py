"""Prompts in dictionaries, as text or token ids."""

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma")
ids = llm.get_tokenizer().encode("The river")
params = SamplingParams(temperature=0, max_tokens=8)
by_ids, by_text, bare = (
    llm.generate(prompt, params)[0].outputs[0].token_ids
    for prompt in ({"prompt_token_ids": ids}, {"prompt": "The river"}, "The river")
)
assert by_ids == by_text == bare
both = llm.generate([{"prompt": "The river"}, {"prompt_token_ids": ids, "prompt": None}], params)
assert [each.outputs[0].token_ids for each in both] == [bare, bare]
