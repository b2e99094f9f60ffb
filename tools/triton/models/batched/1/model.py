"""minillm behind Triton, with the batches that Triton's scheduler forms."""

import os
import sys

import numpy as np
import triton_python_backend_utils as pb

sys.path += os.environ["MINILLM_PATH"].split(os.pathsep)  # the embedded Python ignores PYTHONPATH

from minillm import LLM  # noqa: E402
from minillm.request import SamplingParams  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        self.llm = LLM(os.environ["MINILLM_MODEL"], device="cpu", dtype="float32", max_num_seqs=8)

    def execute(self, requests):
        """Answer a batch. A request may itself have several rows."""
        prompts, params, rows = [], [], []
        for request in requests:
            texts = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)
            most = pb.get_input_tensor_by_name(request, "max_tokens").as_numpy().reshape(-1)
            rows.append(len(texts))
            prompts += [text.decode() for text in texts]
            params += [SamplingParams(temperature=0, max_tokens=int(each), ignore_eos=True) for each in most]
        try:
            done = iter(self.llm.generate(prompts, params))
        except Exception as error:
            return [pb.InferenceResponse(error=pb.TritonError(str(error))) for _ in requests]
        responses = []
        for count in rows:
            texts = [[next(done).text.encode()] for _ in range(count)]
            responses.append(pb.InferenceResponse([pb.Tensor("text_output", np.array(texts, dtype=object))]))
        return responses

    def finalize(self):
        self.llm.close()
