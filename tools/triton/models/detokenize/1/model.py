"""The last step of the ensemble: token ids to text."""

import os
import sys

import numpy as np
import triton_python_backend_utils as pb

sys.path += os.environ["MINILLM_PATH"].split(os.pathsep)  # the embedded Python ignores PYTHONPATH

from minillm import Tokenizer  # noqa: E402
from minillm.tokenizer import StreamingDetokenizer  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_pretrained(os.environ["MINILLM_MODEL"])

    def execute(self, requests):
        responses = []
        for request in requests:
            prompt, ids = (
                pb.get_input_tensor_by_name(request, name).as_numpy().tolist() for name in ("input_ids", "output_ids")
            )
            stream = StreamingDetokenizer(self.tokenizer, after=prompt)  # the first word's space depends on the prompt
            text = np.array([(stream.add(ids) + stream.flush()).encode()], dtype=object)
            responses.append(pb.InferenceResponse([pb.Tensor("text_output", text)]))
        return responses
