"""The gateway: routes here, answers elsewhere.

An upstream OpenAI-compatible server (vLLM, SGLang …) holds the experts as LoRA modules named expert_0, expert_1
and so on. The gateway needs only the bare backbone and the router: it reads the prompt once, picks the expert, and
sends the very tokens that the experts were trained on to the upstream's /v1/completions, so that no other chat
template comes between.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import TypedDict

import httpx
import torch

from fedweave.errors import UserError, first_line
from fedweave.inference.model import FedWeaveModel
from fedweave.inference.text import AnswerText
from fedweave.router.routed import BASE, foremost
from fedweave.serving.jobs import Answering, Ended, Job, Limits, Piece, Routed
from fedweave.serving.protocol import ApiError, Json, busy


class _Chunk(TypedDict, total=False):
    """As much of an upstream's event as is read."""

    choices: list[dict[str, str | None]]  # text, finish_reason
    usage: dict[str, int] | None  # completion_tokens
    error: object


PROBE = "Fix the grammar, then say how many hats Mia has: She have 3 hat and find 4 more."
KINDS = ("vllm", "sglang")

_Judged = tuple[list[float], float | None]  # a prompt's router weights and doubt


class Gateway:
    def __init__(self, model: FedWeaveModel, limits: Limits, url: str, key: str | None = None, kind: str = "vllm"):
        """``kind`` is how the upstream takes an adapter's name: vllm as a model's, sglang as a field of its own."""
        self.model, self.limits, self.kind = model, limits, kind
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(600.0, connect=5.0)
        connections = httpx.Limits(max_connections=None, max_keepalive_connections=limits.max_batch)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_route: asyncio.Queue[tuple[Job, asyncio.Future[_Judged]]] = asyncio.Queue()
        self._slots = asyncio.Semaphore(limits.max_batch)
        self._router: asyncio.Task[None] | None = None
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._tasks) - self.running

    def start(self) -> None:
        self._router = asyncio.get_running_loop().create_task(self._route_all())

    async def stop(self) -> None:
        for task in [*self._tasks, *([self._router] if self._router else [])]:
            task.cancel()
        await self._client.aclose()

    async def problem(self) -> str:
        """Reachable, and with every expert under its name."""
        try:
            served = await self._served()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return f"the upstream {self.url} does not answer: {first_line(error)}"
        if self.kind == "sglang":  # which lists the backbone alone
            return ""
        missing = [name for name in self.model.experts.adapter_names if name not in served]
        return f"the upstream {self.url} does not serve {missing[0]}" if missing else ""

    async def unapplied(self) -> str:
        """Why its experts cannot be told from the bare backbone; empty when they can, or when it cannot be asked.
        Some upstreams answer an adapter's name with the backbone, and nobody would notice."""
        prompt = self.model.backbone.prompts.encode_prompts([PROBE])[0].ids.tolist()
        ask = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        experts = self.model.experts
        try:
            base = await self._base()
            said = [
                await self._scores({**ask, **self._name(name, base)})
                for name in (BASE, *(experts.adapter(m) for m in range(experts.layout.experts)))
            ]
        except (httpx.HTTPError, ApiError, ValueError, KeyError, TypeError, IndexError):
            return ""
        if any(other != said[0] for other in said[1:]):
            return ""
        return (
            f"every expert of the upstream {self.url} answers exactly as its bare backbone, so it does not apply "
            "them: load them under their names, and name an SGLang server with --upstream-kind sglang."
        )

    async def _scores(self, request: Json) -> list[float]:
        response = await self._client.post("/v1/completions", json=request)
        response.raise_for_status()
        return list(response.json()["choices"][0]["logprobs"]["token_logprobs"])

    def _name(self, adapter: str, base: str) -> Json:
        """The fields that choose an adapter; ``base`` is what the upstream calls the bare backbone."""
        if adapter == BASE:
            return {"model": base}
        return {"model": base, "lora_path": adapter} if self.kind == "sglang" else {"model": adapter}

    async def _served(self) -> list[str]:
        response = await self._client.get("/v1/models", timeout=5.0)
        response.raise_for_status()
        return [str(entry["id"]) for entry in response.json()["data"]]

    async def _base(self) -> str:
        """What the upstream calls the bare backbone: base, its own name, or else the first that is no adapter."""
        served = await self._served()
        known = [name for name in (BASE, self.model.backbone.name) if name in served]
        others = [name for name in served if name not in self.model.experts.choices]
        if not known and not others:
            raise ApiError(502, f"the upstream {self.url} does not serve the bare backbone.")
        return (known or others)[0]

    def submit(self, jobs: Sequence[Job]) -> list[Answering]:
        if any(job.routing != "sparse" for job in jobs):
            raise UserError("routing: an upstream serves one expert per request; only sparse is possible here.")
        if any(job.sampling.logprobs is not None for job in jobs):
            raise UserError("logprobs: not offered before an upstream; ask it directly, by the expert's name.")
        if len(self._tasks) + len(jobs) > self.limits.max_batch + self.limits.max_queue:
            raise busy(1)
        return [self._begin(job) for job in jobs]

    def _begin(self, job: Job) -> Answering:
        answering = Answering(job, lambda: task.cancel())
        task = asyncio.get_running_loop().create_task(self._answer(job, answering))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return answering

    async def _answer(self, job: Job, answering: Answering) -> None:
        try:
            async with self._slots:
                self.running += 1
                try:
                    await self._ask(job, answering)
                finally:
                    self.running -= 1
        except ApiError as error:
            answering.tell(error)
        except httpx.HTTPError as error:
            answering.tell(ApiError(502, f"the upstream {self.url} failed: {first_line(error)}."))
        except Exception as error:
            answering.tell(ApiError(502, f"the upstream {self.url} answered in a way not understood: {error!r}."))

    # ---------------------------------------------------------------------------------- routing

    async def _route_all(self) -> None:
        """Prompts that arrive while one pass runs share the next."""
        loop = asyncio.get_running_loop()
        while True:
            asked = [await self._to_route.get()]
            while not self._to_route.empty() and len(asked) < self.limits.max_batch:
                asked.append(self._to_route.get_nowait())
            prompts = [job.prompt for job, _ in asked]
            try:
                weights, doubts = await loop.run_in_executor(None, self.model.judge, prompts)
            except Exception as error:
                for _, future in asked:
                    if not future.done():
                        future.set_exception(ApiError(500, f"routing failed: {first_line(error)}."))
                continue
            for (_, future), row, doubt in zip(asked, weights.tolist(), doubts, strict=True):
                if not future.done():  # the client may have gone
                    future.set_result((row, doubt))

    # ---------------------------------------------------------------------------------- forwarding

    async def _ask(self, job: Job, answering: Answering) -> None:
        experts = self.model.experts
        if job.adapter is None:
            future: asyncio.Future[_Judged] = asyncio.get_running_loop().create_future()
            self._to_route.put_nowait((job, future))
            weights, doubt = await future
            expert = foremost(torch.tensor(weights))
            routed = Routed(expert, experts.adapter(expert), weights, doubt)
        else:
            routed = Routed(experts.only(job.adapter)[0], job.adapter)
        base = await self._base() if routed.adapter == BASE or self.kind == "sglang" else ""
        text = AnswerText(self.model.backbone.tokenizer, trim=job.trim)
        reason, tokens, begun = "stop", 0, False
        async for chunk in self._chunks(self._request(job, self._name(routed.adapter, base))):
            if not begun:  # the upstream has accepted
                answering.tell(routed)
                begun = True
            if used := chunk.get("usage"):
                tokens = used["completion_tokens"]
            for choice in chunk.get("choices", []):
                if piece := text.feed(choice.get("text") or ""):
                    answering.tell(Piece(piece))
                reason = choice.get("finish_reason") or reason
        if not begun:
            raise ApiError(502, f"the upstream {self.url} sent an empty answer.")
        if rest := text.close():
            answering.tell(Piece(rest))
        answering.tell(Ended(reason, tokens))

    def _request(self, job: Job, name: Json) -> Json:
        sampling = job.sampling
        request = {
            **name,
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
            # an extension of vLLM's and SGLang's
            "stop_token_ids": [*self.model.backbone.end_ids, *sampling.stop_token_ids],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return {name: value for name, value in request.items() if value is not None}

    async def _chunks(self, request: Json) -> AsyncIterator[_Chunk]:
        """The upstream's events, parsed; its refusals as ours."""
        async with self._client.stream("POST", "/v1/completions", json=request) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(response, self.url)
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk: _Chunk = json.loads(data)
                if "error" in chunk:
                    raise ApiError(502, f"the upstream {self.url} failed: {chunk['error']}.")
                yield chunk


def _refusal(response: httpx.Response, url: str) -> ApiError:
    """A request it finds wrong, or too many of them, is the client's; anything else is a bad gateway."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    status = response.status_code if response.status_code in (400, 429) else 502
    hint = "; start it with --lora-modules expert_0=… for every expert" if response.status_code == 404 else ""
    return ApiError(status, f"the upstream {url} refuses ({response.status_code}): {message}{hint}")
