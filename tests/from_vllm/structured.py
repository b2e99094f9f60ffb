"""Output that follows a schema or a regular expression."""

import json

from minillm.from_vllm import LLM, SamplingParams

llm = LLM("data/tiny-gemma")
schema = {
    "type": "object",
    "properties": {"wet": {"type": "boolean"}},
    "required": ["wet"],
    "additionalProperties": False,
}
output = llm.generate("Is the river wet?", SamplingParams(json_schema=schema, max_tokens=60))[0]
assert json.loads(output.outputs[0].text).keys() == {"wet"}
output = llm.generate("A color: ", SamplingParams(regex="red|green", max_tokens=20))[0]
assert output.outputs[0].text in ("red", "green")
