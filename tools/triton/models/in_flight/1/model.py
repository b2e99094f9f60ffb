"""minillm behind Triton, with in-flight batching: every request is in the engine at once."""

import asyncio
import os
import sys
import threading

import numpy as np
import triton_python_backend_utils as pb

sys.path += os.environ["MINILLM_PATH"].split(os.pathsep)  # the embedded Python ignores PYTHONPATH

from minillm.engine.async_llm import AsyncLLM  # noqa: E402
from minillm.request import SamplingParams  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        # As many rows as a batch of `batched` has.
        self.engine = AsyncLLM(os.environ["MINILLM_MODEL"], device="cpu", dtype="float32", max_num_seqs=8)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def execute(self, requests):
        """Hand the requests to the engine; it answers later through their senders."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self.answer(request, request.get_response_sender()), self.loop)

    async def answer(self, request, sender):
        def given(name):
            tensor = pb.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        def send(text, ids):
            tensors = [
                pb.Tensor("text_output", np.array([text.encode()], dtype=object)),
                pb.Tensor("output_ids", np.array(ids, dtype=np.int32)),
            ]
            sender.send(pb.InferenceResponse(tensors))

        try:
            text, ids, most, stream = map(given, ("text_input", "input_ids", "max_tokens", "stream"))
            prompt = text[0].decode() if ids is None else ids.tolist()
            params = SamplingParams(temperature=0, max_tokens=16 if most is None else int(most[0]), ignore_eos=True)
            if stream is not None and stream[0]:
                async for delta in self.engine.stream(prompt, params):
                    send(delta.text, delta.token_ids)
            else:
                done = await self.engine.generate(prompt, params)
                send(done.text, done.token_ids)
        except Exception as error:  # it harms no other request
            sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        self.engine.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
