"""sampling_params and use_tqdm by name."""

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma", dtype="float32", gpu_memory_utilization=0.5, enable_chunked_prefill=True)
params = SamplingParams(temperature=0.0, max_tokens=8)
(one,) = llm.generate("The river", sampling_params=params, use_tqdm=True)
(same,) = llm.generate(prompts=["The river"], sampling_params=[params])
assert one.outputs[0].text == same.outputs[0].text != ""
