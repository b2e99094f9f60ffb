"""A conversation, and a list of them."""

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma")
conversation = [{"role": "user", "content": "On which island does Fenwick lie?"}]
outputs = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
for output in outputs:
    print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")
assert conversation[0]["content"] in outputs[0].prompt and outputs[0].outputs[0].text
batch = llm.chat([conversation, conversation], sampling_params=SamplingParams(temperature=0, max_tokens=20))
assert [each.outputs[0].text for each in batch] == [outputs[0].outputs[0].text] * 2
