"""The messages of a conversation, as requests have them.  Lesson 99."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from minillm.from_vllm.http import refused_member
from minillm.values import shown

from ..limits import MAX_PARTS, MAX_ROLE
from .api_error import APIError, check_members


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # of Anthropic's API: no effect, as all prefixes are cached


class Message(BaseModel):
    """One turn of a conversation. Clients send answers back with more fields, which are accepted only if empty.

    id and cache_control have no effect.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    role: str
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    name: str | None = None
    id: str | None = None
    cache_control: dict[str, Any] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[None], Field(max_length=0)] | None = None
    tool_call_id: None = None
    reasoning: None = None
    reasoning_content: None = None

    def plain(self) -> dict[str, str]:
        """Return the message in the form that chat templates expect."""
        parts = self.content
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


def checked_messages(content: dict) -> dict:
    """Return a body if its messages have known members only. Raises APIError."""
    messages = content.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        check_members(f"messages.{i}", message, Message)
        if refused := refused_member(message):
            raise APIError(f"messages.{i}.{refused}", param="messages")
        role, parts = message.get("role"), message.get("content")
        if isinstance(role, str) and len(role) > MAX_ROLE:  # chat templates quote an unknown role in their error
            reason = f"has {len(role):,} characters, but at most {MAX_ROLE} are allowed"
            raise APIError(f"messages.{i}.role {reason}", param="messages")
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
                message = f"messages.{i}.content.{j} is of type {shown(kind)}, but models read text only"
                raise APIError(message, param="messages")
            check_members(f"messages.{i}.content.{j}", part, ContentPart)
    return content


def turns(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return a conversation in the form that chat templates expect. Raises APIError."""
    if all(message.role in ("system", "developer") for message in messages):
        raise APIError("messages has only system or developer messages: add a user message", param="messages")
    return [message.plain() for message in messages]
