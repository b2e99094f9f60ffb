"""The first step of the ensemble: text to token ids."""

import os
import sys

import numpy as np
import triton_python_backend_utils as pb

sys.path += os.environ["MINILLM_PATH"].split(os.pathsep)  # the embedded Python ignores PYTHONPATH

from minillm import Tokenizer  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_pretrained(os.environ["MINILLM_MODEL"])

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            ids = np.array(self.tokenizer.encode(text), dtype=np.int32)
            responses.append(pb.InferenceResponse([pb.Tensor("input_ids", ids)]))
        return responses
