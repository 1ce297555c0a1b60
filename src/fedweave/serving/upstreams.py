"""The programs that a gateway stands before: what each calls an expert, how it is asked, what its events say.

All are sent the tokens of a prompt, so that no other chat template comes between, and all answer with a stream; in
one piece only where the prompt's own log-probabilities are asked for.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fedweave.errors import UserError
from fedweave.inference.model import FedWeaveModel
from fedweave.inference.rows import TokenScore
from fedweave.inference.sampling import Sampling
from fedweave.inference.text import AnswerText
from fedweave.router.routed import BASE
from fedweave.serving.jobs import Job
from fedweave.serving.protocol import ApiError, Json

Chunk = dict[str, Any]  # one event, parsed

# Fields of an upstream that are the gateway's to fill in, whatever the upstream calls them.
OWN = ("model", "prompt", "messages", "stream", "stream_options", "lora", "lora_path", "n_predict", "n_probs", "n")


@dataclass(frozen=True)
class Heard:
    """What one event says."""

    text: str = ""
    reason: str | None = None  # why the answer ended: stop or length
    tokens: int | None = None  # of the answer so far
    scores: tuple[TokenScore, ...] = ()
    last: bool = False  # nothing that matters follows


class Vllm:
    """vLLM, or another fedweave server: an adapter is a model by its name."""

    path = "/v1/completions"
    remedy = "start it with --lora-modules expert_0=… for every expert"

    def __init__(self, client: httpx.AsyncClient, model: FedWeaveModel):
        self.client, self.model = client, model

    async def lacks(self) -> str:
        """An adapter that it does not serve; empty: none."""
        served = await self._served()
        return next((name for name in self.model.experts.adapter_names if name not in served), "")

    async def chosen(self, adapter: str) -> Json:
        """The fields that choose an adapter."""
        return {"model": await self._base() if adapter == BASE else adapter}

    async def offered(self) -> Collection[str]:
        """The fields that it takes, as it describes itself; none where it does not."""
        response = await self.client.get("/openapi.json", timeout=5.0)
        if response.status_code != 200:
            return ()
        return set(response.json()["components"]["schemas"]["CompletionRequest"]["properties"])

    def check(self, sampling: Sampling) -> None:
        """Refuse what it does not offer."""

    def request(self, job: Job, chosen: Json) -> Json:
        sampling = job.sampling
        request = {
            **chosen,
            "prompt": job.prompt.ids.tolist(),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature if sampling.do_sample else 0,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,  # said outright, lest the upstream takes a default of the model's own
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": None if sampling.seed is None else sampling.seed + job.number,
            "frequency_penalty": sampling.frequency_penalty or None,
            "presence_penalty": sampling.presence_penalty or None,
            "min_tokens": sampling.min_new_tokens or None,
            "response_format": {"type": "json_object"} if sampling.json_object else None,
            "stop": list(sampling.stop_strings) or None,
            # extensions of vLLM's and SGLang's
            "stop_token_ids": self.ends(job),
            "logprobs": sampling.logprobs,
            "return_tokens_as_token_ids": None if sampling.logprobs is None else True,
            "echo": sampling.echo or None,
            "stream": not sampling.echo,
            "stream_options": None if sampling.echo else {"include_usage": True},
        }
        return {name: value for name, value in request.items() if value is not None} | dict(job.passed)

    def ends(self, job: Job) -> list[int]:
        """Tokens that end this answer: those of training, unless it is to go on whatever comes."""
        own = [] if job.passed.get("ignore_eos") else self.model.backbone.end_ids
        return [*own, *job.sampling.stop_token_ids]

    def heard(self, chunk: Chunk, job: Job) -> Heard:
        usage = chunk.get("usage") or {}
        choice: Chunk = next(iter(chunk.get("choices", [])), {})
        scores, text = self._scores(choice.get("logprobs") or {}), choice.get("text") or ""
        if job.sampling.echo:
            scores, text = self._echoed(scores, job)
        return Heard(text, choice.get("finish_reason"), usage.get("completion_tokens"), scores)

    def _echoed(self, scores: tuple[TokenScore, ...], job: Job) -> tuple[tuple[TokenScore, ...], str]:
        """(scores of prompt and answer without its end, the answer's text), where the upstream's text begins with
        the prompt in its own spelling."""
        prompt, ends = len(job.prompt.ids), self.ends(job)
        if [score.token for score in scores[:prompt]] != job.prompt.ids.tolist():
            raise ApiError(502, f"the upstream {self.client.base_url} tells no log-probabilities of the prompt.")
        text = AnswerText(self.model.backbone.tokenizer, job.sampling.stop_strings, trim=False)
        answer = [score for score in scores[prompt:] if score.token not in ends]
        for score in answer:
            text.add(score.token)
        text.close()
        return (*scores[:prompt], *answer), text.text

    def _scores(self, told: dict[str, Any]) -> tuple[TokenScore, ...]:
        tokens, tops = told.get("tokens") or [], told.get("top_logprobs") or []
        tops = [top or {} for top in tops] or [{}] * len(tokens)
        return tuple(
            TokenScore(self._id(token), logprob, {self._id(other): value for other, value in top.items()})
            for token, logprob, top in zip(tokens, told.get("token_logprobs") or [], tops, strict=True)
        )

    def _id(self, token: str) -> int:
        return int(token.removeprefix("token_id:"))

    async def _served(self) -> list[str]:
        response = await self.client.get("/v1/models", timeout=5.0)
        response.raise_for_status()
        return [str(entry["id"]) for entry in response.json()["data"]]

    async def _base(self) -> str:
        """What it calls the bare backbone: base, its own name, or else the first that is no adapter."""
        served = await self._served()
        known = [name for name in (BASE, self.model.backbone.name) if name in served]
        others = [name for name in served if name not in self.model.experts.choices]
        if not known and not others:
            raise ApiError(502, f"the upstream {self.client.base_url} does not serve the bare backbone.")
        return (known or others)[0]


class Sglang(Vllm):
    """SGLang: an adapter is a field of its own, and the bare name would be answered by the backbone."""

    remedy = "start it with --lora-paths expert_0=… for every expert"

    async def lacks(self) -> str:
        await self._served()  # which lists the backbone alone
        return ""

    async def chosen(self, adapter: str) -> Json:
        return {"model": await self._base(), "lora_path": None if adapter == BASE else adapter}

    def check(self, sampling: Sampling) -> None:
        if sampling.logprobs is not None:
            raise UserError("logprobs: not offered before SGLang; ask it directly, by the expert's name.")

    def request(self, job: Job, chosen: Json) -> Json:
        request = super().request(job, chosen)
        request.pop("return_tokens_as_token_ids", None)  # it tells tokens by their texts
        return request

    def _id(self, token: str) -> int:
        return -1  # a text may belong to several tokens


class Llama(Vllm):
    """llama-server: an adapter is a file that it was started with, and its scale a field of every request."""

    path = "/completion"
    remedy = "start it with --lora expert_0.gguf,… of `fedweave export --format gguf`"

    async def lacks(self) -> str:
        numbers = await self._numbers()
        return next((name for name in self.model.experts.adapter_names if name not in numbers), "")

    async def chosen(self, adapter: str) -> Json:
        """Every scale is said: what is left out would be what the server was started with."""
        numbers = await self._numbers()
        if adapter != BASE and adapter not in numbers:
            raise ApiError(502, f"the upstream {self.client.base_url} does not serve {adapter}; {self.remedy}.")
        return {"lora": [{"id": i, "scale": float(name == adapter)} for name, i in numbers.items()]}

    async def offered(self) -> Collection[str]:
        response = await self.client.get("/props", timeout=5.0)
        response.raise_for_status()
        described = set(response.json()["default_generation_settings"]["params"])
        return described | {"logit_bias", "grammar", "json_schema", "response_format", "cache_prompt", "id_slot"}

    def check(self, sampling: Sampling) -> None:
        if sampling.echo:
            raise UserError("echo: llama-server has no log-probabilities of a prompt; ask without --upstream.")
        if sampling.min_new_tokens:
            raise UserError("min_tokens: llama-server does not offer it.")

    def request(self, job: Job, chosen: Json) -> Json:
        sampling = job.sampling
        request = {
            **chosen,
            "prompt": job.prompt.ids.tolist(),
            "n_predict": sampling.max_new_tokens,
            "temperature": sampling.temperature if sampling.do_sample else 0,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(job.prompt.ids) + sampling.max_new_tokens,  # all of it
            "seed": None if sampling.seed is None else (sampling.seed + job.number) % (1 << 32),
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "json_schema": {"type": "object"} if sampling.json_object else None,
            "stop": list(sampling.stop_strings),
            "n_probs": None if sampling.logprobs is None else max(1, sampling.logprobs),
            "stream": True,
        }
        passed = dict(job.passed)
        schema = passed.pop("response_format", None)
        if isinstance(schema, dict):
            passed["json_schema"] = (schema.get("json_schema") or {}).get("schema", {})
        return {name: value for name, value in request.items() if value is not None} | passed

    def heard(self, chunk: Chunk, job: Job) -> Heard:
        """A file need not know which tokens end an answer, so that they are looked for here."""
        count, kind = int(chunk.get("tokens_predicted") or 0), chunk.get("stop_type")
        ends = self.ends(job)
        if any(token in ends for token in chunk.get("tokens") or []):
            return Heard(reason="stop", tokens=count - 1, last=True)
        if chunk.get("stop"):
            reason = "length" if kind == "limit" else "stop"
            return Heard(chunk.get("content") or "", reason, count - (kind == "eos"), last=True)
        likeliest = job.sampling.logprobs or 0
        scores = tuple(
            TokenScore(one["id"], one["logprob"], {t["id"]: t["logprob"] for t in one["top_logprobs"][:likeliest]})
            for one in chunk.get("completion_probabilities") or []
        )
        return Heard(chunk.get("content") or "", None, count, scores)

    async def _numbers(self) -> dict[str, int]:
        """Of every adapter, by its file's name."""
        response = await self.client.get("/lora-adapters", timeout=30.0)
        response.raise_for_status()
        return {Path(str(entry["path"])).stem: int(entry["id"]) for entry in response.json()}


KINDS = {"vllm": Vllm, "sglang": Sglang, "llama": Llama}
