"""Fields, members and paths of vLLM's HTTP API that the server lacks: what to do instead."""

from collections.abc import Mapping
from typing import Any

RENDERED = "render it, /tokenize the text with add_special_tokens false, and send the token ids to /v1/completions"
SCHEMA = 'use response_format {"type": "json_schema", ...}'
# Fields of a request over HTTP.
FIELDS: dict[str, tuple[tuple, str]] = {
    "skip_special_tokens": ((True,), "decode the token ids yourself: return_token_ids sends them"),
    "spaces_between_special_tokens": ((True, False), "leave it out"),
    "include_stop_str_in_output": ((False,), "a choice's stop_reason is the string that ended it"),
    "use_beam_search": ((False,), "use n and pick the best choice yourself"),
    "length_penalty": ((1, 1.0), "use n and pick the best choice yourself"),
    "guided_json": ((), SCHEMA),
    "guided_regex": ((), SCHEMA + " with a string's pattern"),
    "guided_choice": (([],), SCHEMA + " with an enum"),
    "guided_grammar": ((), SCHEMA),
    "guided_decoding_backend": ((), "leave it out"),
    "structured_outputs": (
        ({},),
        SCHEMA + ", whose schema may be a string's pattern (for regex) or an enum (for choice)",
    ),
    "prompt_logprobs": ((), "use echo with logprobs in /v1/completions"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself: /tokenize counts its tokens"),
    "allowed_token_ids": ((), "use logit_bias"),
    "bad_words": (([],), "for words of one token use logit_bias"),
    "logits_processors": (([],), "use logit_bias"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "chat_template": ((), "put the template into the model's tokenizer_config.json"),
    "chat_template_kwargs": (({},), RENDERED),
    "add_generation_prompt": ((True,), RENDERED),
    "continue_final_message": ((False,), RENDERED),
    "documents": (([],), "put them into a message"),
    "mm_processor_kwargs": (({},), "models read text only"),
    "request_id": ((), "send it as the header x-request-id"),
    "kv_transfer_params": ((), "an engine keeps its own cache"),
    "vllm_xargs": (({},), "leave it out"),
    "early_stopping": ((False,), "use n and pick the best choice yourself"),
    "include_reasoning": ((True, False), "read the answer's text yourself"),
    "thinking_token_budget": ((), "use max_tokens"),
    "chat_template_content_format": (("auto", "string"), "contents in parts are joined as text"),
    "detokenize": ((True,), "use return_token_ids"),
    "guided_whitespace_pattern": ((), "leave it out"),
}
CALLS = "the server calls no tools, so write the calls into the content"
# Members of a chat's message.
TURN: dict[str, tuple[tuple, str]] = {
    "tool_calls": (([],), CALLS),
    "function_call": ((), CALLS),
    "tool_call_id": ((), "put the tool's answer into a user message"),
    **dict.fromkeys(("reasoning", "reasoning_content"), ((), "leave it out")),
}
# Paths that this server lacks.
PATHS = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
    "/invocations": "use /v1/chat/completions or /v1/completions",
    **dict.fromkeys(
        ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"),
        "there are generating models only",
    ),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), "start the server with --adapter-folder DIR"),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), "models read text only"),
    "/generate": "use /v1/completions",
    "/load": "the numbers of requests are at /metrics",
    "/server_info": "the model's limits are at /v1/models",
    "/tokenizer_info": "read the model's tokenizer_config.json",
    "/reset_prefix_cache": "use_prefix_cache false in a request neither reads nor fills it",
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), "stop the server, and start it again"),
    **dict.fromkeys(("/start_profile", "/stop_profile"), "start the server with --trace FILE"),
}
RENDERING = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


def refused_member(message: Mapping[str, Any]) -> str:
    """Return which member of a chat's message is refused, and what to do instead; "" if none is."""
    for name, (nothing, instead) in TURN.items():
        if message.get(name) not in (None, *nothing):
            return f"{name} is not supported: {instead}"
    return 'content is null: send the text, or "" if there is none' if message.get("content", "") is None else ""
