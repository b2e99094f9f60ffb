"""Options, arguments and prompts of vLLM's Python API: translated, or what to do instead."""

from collections.abc import Mapping
from typing import Any

from minillm.errors import ConfigError, InvalidRequest
from minillm.values import as_int, shown

ANY = object()  # every value asks for nothing that is missing here
# Options that minillm does not have: the values that ask for nothing, and what to do instead of any other.
ENGINE: dict[str, tuple[tuple, str]] = {
    "data_parallel_size": ((1, None), "start one engine for each"),
    "distributed_executor_backend": ((None, "uni", "mp"), "the engine starts its processes itself"),
    "trust_remote_code": ((ANY,), ""),  # no code that comes with a model is ever run
    "revision": ((None, "main"), "name the model as org/name@revision"),
    "tokenizer_revision": ((None, "main"), "give the tokenizer's directory as `tokenizer`"),
    "tokenizer_mode": ((None, "auto", "slow"), "give a tokenizer object as `tokenizer`"),
    "skip_tokenizer_init": ((None, False), "prompts may be token ids in any case"),
    "download_dir": ((None,), "set HF_HOME"),
    "runner": ((None, "auto", "generate"), "there are generating models only"),
    "task": ((None, "auto", "generate"), "there are generating models only"),
    "swap_space": ((ANY,), ""),  # preempted requests are computed anew
    "cpu_offload_gb": ((None, 0), "weights stay in the GPU's memory: quantize them, as quantization='int8'"),
    "enable_chunked_prefill": (
        (None, True),
        "prompts are always cut into chunks; policy='whole' runs them in one step",
    ),
    "enable_sleep_mode": ((None, False), "close the LLM, and make another one"),
    "attention_backend": ((ANY,), ""),  # there is one for a CPU, and one for a GPU
    "disable_cascade_attn": ((ANY,), ""),
    "enable_lora": ((None, False), "give adapters={'NAME': DIR}, or max_loras if all are loaded later"),
    "speculative_config": (
        (None,),
        "use speculate='ngram', which drafts from the text itself, or give a draft model's directory as speculate",
    ),
    "disable_log_stats": ((ANY,), ""),
    "disable_custom_all_reduce": ((ANY,), ""),
    "max_seq_len_to_capture": ((ANY,), ""),
    "compilation_config": ((None, {}), "enforce_eager=True turns CUDA graphs off; `minillm build` tunes them"),
    "limit_mm_per_prompt": ((None, {}), "models read text only"),
    "hf_overrides": ((None, {}), "edit the model's config.json"),
    "async_scheduling": ((None, True), "run_ahead=0 reads each step's tokens before the next is launched"),
    "num_gpu_blocks_override": ((None,), "use num_blocks"),
    "scheduling_policy": ((None, "fcfs"), "use policy='priority'"),
    "generation_config": ((None, "vllm"), "give temperature and the like as SamplingParams"),
    "override_generation_config": ((None, {}), "give temperature and the like as SamplingParams"),
    "rope_scaling": ((None, {}), "edit the model's config.json"),
    "rope_theta": ((None,), "edit the model's config.json"),
    "config_format": ((None, "auto", "hf"), "give a directory in Hugging Face's layout"),
    "model_impl": ((None, "auto", "vllm"), "one implementation runs all models"),
    "logits_processors": ((None, [], ()), "use logit_bias, or replace the sampler with minillm.using"),
    "kv_transfer_config": ((None,), "an engine keeps its own cache"),
    "worker_cls": ((None, "auto"), "the engine starts its processes itself"),
    "served_model_name": ((ANY,), ""),  # `minillm serve` has it
    "max_logprobs": ((ANY,), ""),
    "hf_token": ((None,), "set HF_TOKEN, or log in with `hf auth login`"),
    "guided_decoding_backend": ((ANY,), ""),
    "structured_outputs_config": ((ANY,), ""),
    "num_scheduler_steps": ((ANY,), ""),
    "preemption_mode": ((ANY,), ""),
    "use_v2_block_manager": ((ANY,), ""),
    "convert": ((None, "auto", "none"), "there are generating models only"),
    "pooler_config": ((None,), "there are generating models only"),
    "chat_template": ((None,), "put the template into the model's tokenizer_config.json"),
    "kv_cache_memory_bytes": ((None,), "use num_blocks, or gpu_memory_utilization"),
    "cudagraph_capture_sizes": ((None,), "`minillm build` chooses them"),
    "attention_config": ((None, {}), "there is one backend for a CPU, and one for a GPU"),
    "profiler_config": ((None, {}), "give trace=FILE, or use torch.profiler around generate"),
    "mm_processor_kwargs": ((None, {}), "models read text only"),
    "enable_prompt_embeds": ((ANY,), ""),  # of the caller's own process: `minillm serve` has it, too
    "enable_expert_parallel": ((None, False), "there are no models of experts"),
    "disable_sliding_window": ((None, False), "windows are those of the model's config.json"),
    "calculate_kv_scales": ((ANY,), ""),  # each token and head has a scale of its own
    "allowed_local_media_path": ((ANY,), ""),
    "max_cpu_loras": ((ANY,), ""),
    "max_parallel_loading_workers": ((ANY,), ""),
    "optimization_level": ((ANY,), ""),
}
# vLLM's values of options that both have.
VALUES: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "max_model_len": {-1: None},
}
NONE_IS_DEFAULT = (
    "block_size",
    "decode_context_parallel_size",
    "dtype",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "load_format",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)
STORED = (
    "leave it out for a checkpoint that is quantized already, as its format is in its config.json; `minillm quantize "
    "--method awq` makes one, and 'int4' rounds while loading"
)
GGUF = "give the .gguf file as the model"
SAFETENSORS = "give a directory with weights as safetensors"
# Values that minillm does not have, of options that both have, and what to do instead.
OTHER_VALUES: dict[str, dict[str, str]] = {
    "quantization": {
        **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt"), STORED),
        **dict.fromkeys(("auto-round", "fbgemm_fp8"), STORED),
        **dict.fromkeys(("bitsandbytes", "torchao"), "'int4' and 'int8' round while loading"),
        **dict.fromkeys(("ptpc_fp8", "experts_int8"), "'fp8' and 'int8' round while loading"),
        "gguf": GGUF,
    },
    "load_format": {
        "bitsandbytes": "leave it out: quantization 'int4' and 'int8' round while loading",
        "gguf": GGUF,
        **dict.fromkeys(("pt", "npcache", "mistral", "sharded_state", "tensorizer"), SAFETENSORS),
        **dict.fromkeys(("runai_streamer", "fastsafetensors"), "leave it out"),
    },
    "kv_cache_dtype": {
        **dict.fromkeys(("bfloat16", "float16", "half", "float32"), "use 'auto', which is the model's dtype"),
        **dict.fromkeys(("fp8_e5m2", "fp8_inc"), "use 'fp8', which is e4m3 with a scale for each token and head"),
    },
}
SAMPLING: dict[str, tuple[tuple, str]] = {
    "best_of": ((None, 1), "use n and pick the best choice yourself"),
    "use_beam_search": ((None, False), "use n and pick the best choice yourself"),
    "skip_special_tokens": ((None, True), "decode `token_ids` with the tokenizer yourself"),
    "spaces_between_special_tokens": ((ANY,), ""),
    "include_stop_str_in_output": ((None, False), "the completion's `stop_reason` is the string that ended it"),
    "detokenize": ((None, True), "read `token_ids` and leave `text` alone"),
    "truncate_prompt_tokens": ((None,), "cut the prompt's token ids yourself"),
    "guided_decoding": ((None,), "use json_schema={...} or regex='...'"),
    "structured_outputs": ((None,), "use json_schema={...} or regex='...'"),
    "bad_words": ((None, [], ()), "for words of one token use logit_bias={token: -100}"),
    "allowed_token_ids": ((None,), "use logit_bias, or regex='...'"),
    "logits_processors": ((None, [], ()), "use logit_bias, or replace the sampler with minillm.using"),
    "output_kind": ((ANY,), ""),
    "extra_args": ((None, {}), "leave it out"),
    "length_penalty": ((None, 1, 1.0), "use n and pick the best choice yourself"),
    "early_stopping": ((None, False), "use n and pick the best choice yourself"),
    "flat_logprobs": ((None, False), "logprobs has a dictionary for each token"),
    "skip_reading_prefix_cache": ((None, False), "give options=RequestOptions(use_prefix_cache=False)"),
    "thinking_token_budget": ((None,), "use max_tokens"),
}
# The rendered text begins with its own beginning-of-text token.
RENDER = "render the conversation, encode it with add_special_tokens=False, and give the token ids to generate"
GENERATE: dict[str, tuple[tuple, str]] = {
    "prompt_token_ids": ((None,), 'give prompts={"prompt_token_ids": ids}, or a list of those'),
    "lora_request": ((None,), "give adapters={'NAME': DIR} to LLM, and adapter='NAME' here"),
    "priority": ((None,), "make LLM(policy='priority'), and give options=[RequestOptions(priority=...), ...]"),
    "tokenization_kwargs": ((None,), "tokenize yourself, and give token ids"),
    "chat_template": ((None,), "put the template into the model's tokenizer_config.json"),
    "add_generation_prompt": ((None, True), RENDER),
    "continue_final_message": ((None, False), RENDER),
    "tools": ((None, []), "put the tools into a message, and use json_schema for the answer"),
    "chat_template_kwargs": ((None, {}), RENDER),
    "chat_template_content_format": ((None, "auto", "string", "openai"), "contents in parts are joined as text"),
    "mm_processor_kwargs": ((None, {}), "models read text only"),
    "reasoning_effort": ((None,), RENDER),
}
# Members of a prompt.
PROMPT: dict[str, tuple[tuple, str]] = {
    **dict.fromkeys(
        ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), ((None, {}), "models read text only")
    ),
    "cache_salt": ((None,), "give options=RequestOptions(cache_salt=...)"),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), ((None,), "there are decoders only")),
}


def without(
    options: Mapping[str, Any], known: Mapping[str, tuple[tuple, str]], error: type[Exception]
) -> dict[str, Any]:
    """Remove vLLM's options that have no effect here. Raises `error` for one that would change the result."""
    left = dict(options)
    for name in options.keys() & known.keys():
        nothing, instead = known[name]
        value = left.pop(name)
        if nothing != (ANY,) and not any(_same(value, each) for each in nothing):
            raise error(f"{name}={shown(value)}: minillm has no such option; {instead}")
    return left


def _same(value: Any, known: Any) -> bool:
    """Return whether they are equal and of one type, numpy's whole numbers counting as Python's."""
    whole = as_int(value)
    value = value if whole is None else whole
    return value is known or (type(value) is type(known) and value == known)


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options of an engine; other names stay as they are. Raises ConfigError."""
    left = without(options, ENGINE, ConfigError)
    for name, values in VALUES.items():
        if isinstance(value := left.get(name), (str, int)) and value in values:
            left[name] = values[value]
    left = {name: value for name, value in left.items() if value is not None or name not in NONE_IS_DEFAULT}
    for name, others in OTHER_VALUES.items():
        if isinstance(value := left.get(name), str) and value in others:
            raise ConfigError(f"{name}={value!r}: {others[value]}")
    return left


def sampling_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the arguments of SamplingParams. Raises InvalidRequest."""
    left = without(options, SAMPLING, InvalidRequest)
    if as_int(left.get("seed")) == -1:
        left["seed"] = None
    return left


def generate_arguments(params: Any, options: Any, progress: bool, others: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return `params` and `progress` of generate and chat, which vLLM calls sampling_params and use_tqdm.

    options: only checked. Raises InvalidRequest, also for a name that neither has.
    """
    left = without(others, GENERATE, InvalidRequest)
    if isinstance(options, bool):
        raise InvalidRequest(f"the third argument is options: give the progress bar by name, as use_tqdm={options}")
    if "sampling_params" in left:
        if params is not None:
            raise InvalidRequest("params and sampling_params are the same: give one of them")
        params = left.pop("sampling_params")
    progress = bool(left.pop("use_tqdm", progress))
    if left:
        known = "params, options, adapter and progress"
        raise InvalidRequest(f"{', '.join(sorted(left))}: no such argument; there are {known}")
    return params, progress


def translated_prompt(prompt: Any) -> Any:
    """Translate a prompt: {"prompt": text} to the text, {"prompt_token_ids": ids} to the ids; others stay as they are.

    Raises InvalidRequest.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    parts = {name: value for name, value in without(prompt, PROMPT, InvalidRequest).items() if value is not None}
    if list(parts) in (["prompt_embeds"], ["parts"]):
        return parts
    value = parts.get("prompt_token_ids", parts.get("prompt"))
    if parts.keys() - {"prompt", "prompt_token_ids"} or value is None or as_int(value) is not None:
        ways = 'a string, token ids, {"prompt": text}, {"prompt_token_ids": ids} or {"prompt_embeds": tensor}'
        raise InvalidRequest(f"a prompt must be {ways}, not {shown(prompt)}")
    if "prompt_token_ids" in parts and isinstance(value, str):  # encoding a chat template's text would begin it twice
        raise InvalidRequest(
            f"prompt_token_ids must be token ids, not {shown(value)}: encode the text, with add_special_tokens=False "
            "if a chat template has made it"
        )
    return value
