"""Token by token, with asyncio."""

import asyncio

from minillm.from_vllm import AsyncLLM, SamplingParams


async def main():
    engine = AsyncLLM("data/tiny-gemma")
    try:
        text = ""
        async for delta in engine.stream({"prompt": "The river"}, SamplingParams(temperature=0, max_tokens=10)):
            text += delta.text
        assert delta.completion.outputs[0].text == text != ""
    finally:
        engine.close()


asyncio.run(main())
