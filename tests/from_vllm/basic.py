"""Several prompts, with the arguments that most scripts pass."""

from minillm.from_vllm import LLM, SamplingParams

prompts = ["The island of", "The river", "Once upon a time there was a"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, skip_special_tokens=True)
llm = LLM(model="data/tiny-gemma", tensor_parallel_size=1, trust_remote_code=True, seed=None, swap_space=4)
outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
assert [output.prompt for output in outputs] == prompts
assert all(output.finished and output.outputs[0].token_ids for output in outputs)
