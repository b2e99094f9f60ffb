"""What Triton's own clients get from Triton and from minillm's server, as one JSON object.

The script tools/triton_server.py runs it, in Triton's environment:

python client.py TRITON_HTTP TRITON_GRPC MINILLM_HTTP PROMPT TOKENS
"""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.http

HTTP, GRPC = tritonclient.http, tritonclient.grpc
SECONDS = 60


def inputs(kind, prompt: str, tokens: int, shape: list[int], **more) -> list:
    """The inputs of a request, in the binary form. kind: the client's module."""
    values = {
        "text_input": ("BYTES", np.array([prompt.encode()], dtype=object)),
        "max_tokens": ("INT32", np.array([tokens], dtype=np.int32)),
        **more,
    }
    found = []
    for name, (datatype, value) in values.items():
        tensor = kind.InferInput(name, shape, datatype)
        tensor.set_data_from_numpy(value.reshape(shape))
        found.append(tensor)
    return found


def text(result) -> str:
    return result.as_numpy("text_output").reshape(-1)[0].decode()


def streamed(client, model: str, prompt: str, tokens: int, **more) -> list[str]:
    """The texts of a decoupled model's responses."""
    results: queue.Queue = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    client.async_stream_infer(model, inputs(GRPC, prompt, tokens, [1], **more), enable_empty_final_response=True)
    texts = []
    while True:
        result, error = results.get(timeout=SECONDS)
        if error is not None:
            raise error
        response = result.get_response()
        if response.outputs:
            texts.append(text(result))
        if response.parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return texts


def main() -> None:
    triton_http, triton_grpc, ours, prompt, count = sys.argv[1:]
    tokens = int(count)
    http, grpc = HTTP.InferenceServerClient(triton_http), GRPC.InferenceServerClient(triton_grpc)
    own = HTTP.InferenceServerClient(ours)
    greedy = {
        "temperature": ("FP32", np.zeros(1, dtype=np.float32)),
        "ignore_eos": ("BOOL", np.ones(1, dtype=bool)),
    }
    pieces = streamed(grpc, "in_flight", prompt, tokens, stream=("BOOL", np.ones(1, dtype=bool)))
    assert len(pieces) > 1, "the stream came in one piece"
    found = {
        "infer over HTTP, batched": text(http.infer("batched", inputs(HTTP, prompt, tokens, [1, 1]))),
        "infer over gRPC, batched": text(grpc.infer("batched", inputs(GRPC, prompt, tokens, [1, 1]))),
        "stream over gRPC, in_flight": "".join(pieces),
        "stream over gRPC, ensemble": "".join(streamed(grpc, "ensemble", prompt, tokens)),
        "infer over HTTP, minillm": text(own.infer("tiny-gemma", inputs(HTTP, prompt, tokens, [1], **greedy))),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
