"""Attributes and names of vLLM's that minillm lacks: what to do instead."""

from typing import NoReturn, TypeVar

ATTRIBUTES: dict[str, dict[str, str]] = {
    "LLM": {
        **dict.fromkeys(("encode", "embed", "score", "classify", "reward"), "there are generating models only"),
        **dict.fromkeys(("sleep", "wake_up"), "close the LLM, and make another one"),
        **dict.fromkeys(("apply_model", "collective_rpc"), "the model is llm.engine.model"),
        **dict.fromkeys(("start_profile", "stop_profile"), "give trace=FILE, or use torch.profiler around generate"),
        "beam_search": "use n and pick the best choice yourself",
        "get_default_sampling_params": "the defaults are SamplingParams()",
        "get_metrics": "`minillm serve` has them at /metrics",
        "llm_engine": "it is llm.engine",
        "reset_prefix_cache": "RequestOptions(use_prefix_cache=False) neither reads nor fills it",
        "set_tokenizer": "give it as LLM(tokenizer=...)",
        "from_engine_args": "give the options to LLM",
        "shutdown": "use close()",
    },
    "AsyncLLM": {
        "from_engine_args": "give the options to AsyncLLM",
        "shutdown": "use close()",
        "get_tokenizer": "it is the attribute tokenizer",
    },
    "Completion": {
        "metrics": "arrival_time, first_token_time and finish_time are attributes of its own",
        "lora_request": "the request's options name its adapter",
        "encoder_prompt": "there are decoders only",
    },
    "Delta": {  # for vLLM's RequestOutput, where code that iterates over generate now does so over stream
        "outputs": "what is new are its own text and token_ids; the last delta's completion has all",
        "finished": "the last delta has a finish_reason",
        **dict.fromkeys(("request_id", "prompt_token_ids"), "the last delta's completion has it"),
    },
    "Logprob": {
        "decoded_token": "use llm.tokenizer.decode([id]), where id is its key in the dictionary",
        "rank": "sort the dictionary's values: it has the most likely tokens, and the one that was sampled",
    },
    "Tokenizer": {  # what transformers' have
        "bos_token": "use token(tokenizer.bos_token_id)",
        "eos_token": "use token(tokenizer.eos_token_id)",
        "convert_ids_to_tokens": "use token(id) for each",
        "convert_tokens_to_ids": "use id(token) for each",
        "tokenize": "use token(id) for each id of encode(text)",
        "batch_decode": "use decode(ids) for each",
        "batch_encode_plus": "use encode(text) for each",
        "get_vocab": "use id(token), token(id) and vocab_size",
        "chat_template": "it is in the model's tokenizer_config.json; apply_chat_template renders it",
        "pad_token_id": "prompts of any lengths run together without padding",
        "pad_token": "prompts of any lengths run together without padding",
    },
    "SamplingParams": {
        "clone": "use dataclasses.replace(params)",
        "from_optional": "leave out the options that are None",
    },
    "minillm.from_vllm": {
        **dict.fromkeys(
            ("StructuredOutputsParams", "GuidedDecodingParams"), "use SamplingParams(json_schema=...) or (regex=...)"
        ),
        **dict.fromkeys(("RequestOutput", "CompletionOutput"), "use Completion, which is both"),
        **dict.fromkeys(("EngineArgs", "LLMEngine"), "give the options to LLM"),
        **dict.fromkeys(("AsyncEngineArgs", "AsyncLLMEngine"), "give the options to AsyncLLM"),
        **dict.fromkeys(
            ("TextPrompt", "TokensPrompt"), 'a prompt may be {"prompt": text} or {"prompt_token_ids": ids}'
        ),
        "BeamSearchParams": "use SamplingParams(n=...) and pick the best choice yourself",
        "PoolingParams": "there are generating models only",
        "RequestOutputKind": "AsyncLLM.stream gives what is new, and AsyncLLM.generate the whole",
        "Logprob": "log-probabilities are {id: number}, and such a number has the attribute logprob",
        "LoRARequest": "give adapters={'NAME': DIR} to LLM, and adapter='NAME' to generate",
    },
}

Class = TypeVar("Class", bound=type)


class _Missing:
    """A missing attribute, of a class and of its instances."""

    def __init__(self, reason: str):
        self.reason = reason

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self.reason)


def explain_missing(kind: Class) -> Class:
    """Give a class the attributes that vLLM's has: reading one raises an AttributeError with what to do instead."""
    for name, instead in ATTRIBUTES[kind.__name__].items():
        setattr(kind, name, _Missing(f"{kind.__name__} has no attribute {name!r}: {instead}"))
    return kind
