"""n choices of each prompt."""

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma")
params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10)
first, second = llm.generate(["The river", "The island of"], params)
assert len(first.outputs) == len(second.outputs) == 3
assert [choice.index for choice in first.outputs] == [0, 1, 2]
assert len({choice.text for choice in first.outputs}) > 1
assert first.outputs[0].text == first.text
assert all(choice.prompt == "The island of" for choice in second.outputs)
best = max(first.outputs, key=lambda choice: len(choice.text))
print(best.text)
