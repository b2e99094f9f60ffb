"""Code written for vLLM: its names for what minillm has too, and what to do instead where minillm has nothing.

docs/from_vllm.md sets both APIs side by side.
"""

from collections.abc import Mapping
from typing import Any

from minillm.errors import ConfigError, InvalidRequest
from minillm.values import shown

ANY = object()  # every value asks for nothing that is missing here
# Options that minillm does not have: the values that ask for nothing, and what to do instead of any other.
ENGINE: dict[str, tuple[tuple, str]] = {
    "tensor_parallel_size": ((1, None), "an engine uses one GPU: start one engine for each"),
    "pipeline_parallel_size": ((1, None), "an engine uses one GPU: start one engine for each"),
    "data_parallel_size": ((1, None), "an engine uses one GPU: start one engine for each"),
    "distributed_executor_backend": ((None, "uni", "mp"), "an engine runs in one process"),
    "trust_remote_code": ((ANY,), ""),  # no code that comes with a model is ever run
    "revision": ((None, "main"), "give the directory of the revision that you want"),
    "tokenizer_revision": ((None, "main"), "give the tokenizer's directory as `tokenizer`"),
    "tokenizer_mode": ((None, "auto", "slow"), "give a tokenizer object as `tokenizer`"),
    "skip_tokenizer_init": ((None, False), "prompts may be token ids in any case"),
    "download_dir": ((None,), "give the model's directory"),
    "runner": ((None, "auto", "generate"), "there are generating models only"),
    "task": ((None, "auto", "generate"), "there are generating models only"),
    "swap_space": ((ANY,), ""),  # preempted requests are computed anew
    "cpu_offload_gb": ((None, 0), "weights stay in the GPU's memory: quantize them, as quantization='int8'"),
    "enable_chunked_prefill": (
        (None, True),
        "prompts are always cut into chunks; policy='whole' runs them in one step",
    ),
    "enable_lora": ((None, False), "merge the adapter into the weights first"),
    "speculative_config": ((None,), "every token is computed by the model itself"),
    "disable_log_stats": ((ANY,), ""),
    "disable_custom_all_reduce": ((ANY,), ""),
    "max_seq_len_to_capture": ((ANY,), ""),
    "compilation_config": ((None,), "enforce_eager=True turns CUDA graphs off; `minillm build` tunes them"),
    "limit_mm_per_prompt": ((None,), "models read text only"),
    "hf_overrides": ((None,), "edit the model's config.json"),
    "async_scheduling": ((None, True), "run_ahead=0 reads each step's tokens before the next is launched"),
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
    "bad_words": ((None, [], ()), "use logit_bias={token: -100}"),
    "allowed_token_ids": ((None,), "use logit_bias, or regex='...'"),
    "logits_processors": ((None, [], ()), "use logit_bias, or replace the sampler with minillm.using"),
    "output_kind": ((ANY,), ""),
    "extra_args": ((None, {}), "leave it out"),
}
GENERATE: dict[str, tuple[tuple, str]] = {
    "lora_request": ((None,), "merge the adapter into the weights first"),
    "priority": ((None,), "give options=[RequestOptions(priority=...), ...]"),
    "tokenization_kwargs": ((None,), "tokenize yourself, and give token ids"),
    "chat_template": ((None,), "put the template into the model's tokenizer_config.json"),
    "add_generation_prompt": ((None, True), "render the conversation yourself, and call generate"),
    "continue_final_message": ((None, False), "render the conversation yourself, and call generate"),
    "tools": ((None, []), "put the tools into a message, and use json_schema for the answer"),
    "chat_template_kwargs": ((None, {}), "render the conversation yourself, and call generate"),
}


def without(given: Mapping[str, Any], known: Mapping[str, tuple[tuple, str]], error: type[Exception]) -> dict[str, Any]:
    """What was given, without those of vLLM's options that ask for nothing. Raises `error` for one that does."""
    left = dict(given)
    for name in given.keys() & known.keys():
        nothing, instead = known[name]
        value = left.pop(name)
        if nothing != (ANY,) and not any(
            value is each or (type(value) is type(each) and value == each) for each in nothing
        ):
            raise error(f"{name}={shown(value)}: minillm has no such option; {instead}")
    return left


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine. Raises ConfigError."""
    return without(given, ENGINE, ConfigError)


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of SamplingParams. Raises InvalidRequest."""
    return without(given, SAMPLING, InvalidRequest)


def asked(params: Any, progress: bool, given: Mapping[str, Any]) -> tuple[Any, bool]:
    """`params` and `progress` of LLM.generate and LLM.chat, which vLLM calls sampling_params and use_tqdm.

    Raises InvalidRequest, also for a name that neither has.
    """
    left = without(given, GENERATE, InvalidRequest)
    if "sampling_params" in left:
        if params is not None:
            raise InvalidRequest("params and sampling_params are the same: give one of them")
        params = left.pop("sampling_params")
    progress = bool(left.pop("use_tqdm", progress))
    if left:
        raise InvalidRequest(f"{', '.join(sorted(left))}: no such argument; there are params, options and progress")
    return params, progress


def prompt(given: Mapping[str, Any]) -> Any:
    """A prompt as vLLM's dictionaries have it: {"prompt": text} or {"prompt_token_ids": ids}. Raises InvalidRequest."""
    found = {name: value for name, value in given.items() if value is not None}
    if not found or found.keys() - {"prompt", "prompt_token_ids"}:
        ways = 'a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
        raise InvalidRequest(f"a prompt must be {ways}, not {shown(given)}")
    return found.get("prompt_token_ids", found.get("prompt"))
