"""Requests and responses as OpenAI clients write and read them."""

import json
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fedweave.errors import UserError
from fedweave.inference.sampling import Sampling
from fedweave.router.mlp import active_experts
from fedweave.serving.fields import check_fields

Json = dict[str, object]


def whole_text(text: str, param: str) -> str:
    """JSON can write half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{param}: the text holds half of a surrogate pair; send whole characters.") from None
    return text


class Message(BaseModel):
    """A chat message; content is a text, or parts of type text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Json]

    def plain(self) -> dict[str, str]:
        """As templates take it: the developer is the system, parts are joined."""
        if isinstance(self.content, str):
            text = self.content
        else:
            parts = [part["text"] for part in self.content if part.get("type") == "text" and "text" in part]
            texts = [part for part in parts if isinstance(part, str)]
            if len(texts) < len(self.content):
                raise UserError("messages: only text parts are understood.")
            text = "\n".join(texts)
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": whole_text(text, "messages"),
        }


class StreamOptions(BaseModel):
    include_usage: bool = False


class CommonRequest(BaseModel):
    """What both endpoints share. Temperature 0, our default, is greedy: that is how the model was tested."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # 0 and -1: all tokens
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(None, ge=0)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    response_format: Json | None = None
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool | None = (
        False  # vLLM's: with logprobs, "token_id:7" in place of a token's text
    )
    routing: str = "sparse"  # ours: sparse, soft, top2 …

    def limit(self) -> int | None:
        return self.max_tokens

    def scored(self) -> tuple[int | None, bool]:
        """(how many likeliest tokens to tell of beside each token's log-probability, also of the prompt's)"""
        return None, False

    def passed(self, offered: Collection[str]) -> Json:
        """Fields for an upstream that offers them: those unknown here, and forms of answers beyond ours."""
        given = {name: value for name, value in (self.model_extra or {}).items() if name in offered}
        if "response_format" in offered and self._form() not in ("text", "json_object"):
            given["response_format"] = self.response_format
        return given

    def _form(self) -> object:
        return (self.response_format or {}).get("type", "text")

    def json_mode(self, passed: Collection[str]) -> bool:
        kind = self._form()
        if kind not in ("text", "json_object") and "response_format" not in passed:
            raise UserError(f"response_format: text and json_object are offered, not {kind!r}.")
        return kind == "json_object"

    def sampling(self, longest: int, passed: Collection[str] = ()) -> Sampling:
        """How to answer; whatever is not offered, nor ``passed`` on, is one sentence."""
        unknown = {name: value for name, value in (self.model_extra or {}).items() if name not in passed}
        check_fields(unknown, list(type(self).model_fields))
        active_experts(self.routing)
        asked = self.limit()
        if asked is not None and asked > longest:
            raise UserError(f"max_tokens: at most {longest} tokens are answered here, not {asked}.")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > 16:
            raise UserError("stop: at most 16 stop strings.")
        options: Json = {
            "max_new_tokens": asked or longest,
            "min_new_tokens": self.min_tokens,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "stop_strings": stops,
            "stop_token_ids": self.stop_token_ids,
            "json_object": self.json_mode(passed),
            "logprobs": self.scored()[0],
            "echo": self.scored()[1],
        }
        if self.temperature:  # 0 and null are greedy; what shapes a draw then has nothing to shape
            drawn = {k: getattr(self, k) for k in ("temperature", "top_p", "top_k", "min_p", "seed")}
            options |= {"do_sample": True, **drawn, "top_k": max(0, self.top_k or 0)}
        return Sampling.of(options)


class ChatRequest(CommonRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def scored(self) -> tuple[int | None, bool]:
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs: has no effect without logprobs=true.")
        return (self.top_logprobs or 0, False) if self.logprobs else (None, False)

    def prompt(self) -> tuple[dict[str, str], ...]:
        messages = tuple(message.plain() for message in self.messages)
        if not any(m["role"] == "user" and m["content"].strip() for m in messages):
            raise UserError("messages: there is no user message, or it is empty.")
        return messages


class CompletionRequest(CommonRequest):
    """Texts are continued as they stand, without the template; lists of token ids too."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False

    def scored(self) -> tuple[int | None, bool]:
        if self.echo and self.stream:
            raise UserError("echo: not offered in a stream; leave out stream.")
        return self.logprobs, bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """Always several: each a text or a list of token ids."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        ids = [token for token in given if isinstance(token, int)]
        if ids:  # one prompt
            return [ids]
        return [whole_text(p, "prompt") if isinstance(p, str) else p for p in given if not isinstance(p, int)]


# ------------------------------------------------------------------------------------------ responses


class Reply:
    """The envelope of one response: its id, model and time, whole or in chunks."""

    def __init__(self, kind: Literal["chat", "text"], model: str):
        self.kind, self.model, self.created = kind, model, int(time.time())
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex[:24]}"

    def whole(
        self,
        texts: list[str],
        reasons: list[str],
        scores: list[Json | None],
        usage: dict[str, int],
        fedweave: object,
    ) -> Json:
        choices = [
            {"index": i, "finish_reason": reason, "logprobs": scored}
            | ({"message": {"role": "assistant", "content": text}} if self.kind == "chat" else {"text": text})
            for i, (text, reason, scored) in enumerate(zip(texts, reasons, scores, strict=True))
        ]
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._envelope(kind, choices) | {"usage": usage, "fedweave": fedweave}

    def chunk(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        first: bool = False,
        extra: Json | None = None,
        logprobs: Json | None = None,
    ) -> str:
        """One event of a stream; the first of a chat names the role, the last the reason."""
        if self.kind == "chat":
            delta: Json = {"role": "assistant", "content": text} if first else {"content": text}
            content: Json = {"delta": {} if reason else delta}
        else:
            content = {"text": text}
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs, **content}
        return event(self._envelope(self._chunk_kind, [choice]) | (extra or {}))

    def usage_chunk(self, usage: dict[str, int]) -> str:
        return event(self._envelope(self._chunk_kind, []) | {"usage": usage})

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ApiError(Exception):
    """No answer, or no more of it: an HTTP status and a sentence, in the shape that OpenAI clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def busy(seconds: int) -> ApiError:
    """No room for more; try again after some seconds."""
    message = f"the queue is full; try again in {seconds} s."
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})
