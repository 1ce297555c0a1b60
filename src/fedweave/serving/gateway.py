"""The gateway: routes here, answers elsewhere.

An upstream server (vLLM, SGLang, llama-server: ``upstreams.py``) holds the experts as LoRA adapters named expert_0,
expert_1 and so on. The gateway needs only the bare backbone and the router: it reads the prompt once, picks the
expert, and sends the very tokens that the experts were trained on to the upstream.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing

import httpx
import torch

from fedweave.errors import UserError, first_line
from fedweave.inference.model import FedWeaveModel
from fedweave.inference.sampling import Sampling
from fedweave.inference.text import AnswerText
from fedweave.router.routed import BASE, foremost
from fedweave.serving.jobs import Answering, Ended, Job, Limits, Piece, Routed
from fedweave.serving.protocol import ApiError, Json, busy
from fedweave.serving.upstreams import KINDS, OWN, Chunk, Heard

PROBE = "Fix the grammar, then say how many hats Mia has: She have 3 hat and find 4 more."

_Judged = tuple[list[float], float | None]  # a prompt's router weights and doubt
_BROKEN = (httpx.HTTPError, ApiError, ValueError, KeyError, TypeError, IndexError)  # what an odd upstream leads to


class Gateway:
    def __init__(self, model: FedWeaveModel, limits: Limits, url: str, key: str | None = None, kind: str = "vllm"):
        """``kind`` is which program the upstream is, for each takes an adapter in its own way."""
        model.require_whole_span("an upstream server")
        self.model, self.limits, self.kind = model, limits, kind
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(600.0, connect=5.0)
        connections = httpx.Limits(max_connections=None, max_keepalive_connections=limits.max_batch)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout, limits=connections)
        self.upstream = KINDS[kind](self._client, model)
        self._offered: Collection[str] | None = None
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
            missing = await self.upstream.lacks()
        except _BROKEN as error:
            return f"the upstream {self.url} does not answer: {first_line(error)}"
        return f"the upstream {self.url} does not serve {missing}; {self.upstream.remedy}" if missing else ""

    async def passes(self) -> Collection[str]:
        """Fields that the upstream offers and this server does not know: they are handed on as they are."""
        if self._offered is None:
            try:
                self._offered = set(await self.upstream.offered()) - set(OWN)
            except _BROKEN:
                return ()
        return self._offered

    async def unapplied(self) -> str:
        """Why its experts cannot be told from the bare backbone; empty when they can, or when it cannot be asked.
        Some upstreams answer an adapter's name with the backbone, and nobody would notice."""
        job = Job(self.model.backbone.prompts.encode_prompts([PROBE])[0], Sampling(max_new_tokens=8, logprobs=1))
        experts = self.model.experts
        try:
            base = await self._logprobs(job, BASE)
            for m in range(experts.layout.experts):
                if not base or await self._logprobs(job, experts.adapter(m)) != base:
                    return ""
        except _BROKEN:
            return ""
        return (
            f"every expert of the upstream {self.url} answers exactly as its bare backbone, so it does not apply "
            f"them: {self.upstream.remedy}, and say with --upstream-kind which program it is."
        )

    async def _logprobs(self, job: Job, adapter: str) -> list[float | None]:
        return [score.logprob async for heard in self._stream(job, adapter) for score in heard.scores]

    def submit(self, jobs: Sequence[Job]) -> list[Answering]:
        if any(job.routing != "sparse" for job in jobs):
            raise UserError("routing: an upstream serves one expert per request; only sparse is possible here.")
        for job in jobs:
            self.upstream.check(job.sampling)
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
        text = AnswerText(self.model.backbone.tokenizer, trim=job.trim)
        reason, tokens, begun = "stop", 0, False
        async for heard in self._stream(job, routed.adapter):
            if not begun:  # the upstream has accepted
                answering.tell(routed)
                begun = True
            piece = text.feed(heard.text)
            if piece or heard.scores:
                answering.tell(Piece(piece, heard.scores))
            reason, tokens = heard.reason or reason, tokens if heard.tokens is None else heard.tokens
        if not begun:
            raise ApiError(502, f"the upstream {self.url} sent an empty answer.")
        if rest := text.close():
            answering.tell(Piece(rest))
        answering.tell(Ended(reason, tokens))

    async def _stream(self, job: Job, adapter: str) -> AsyncIterator[Heard]:
        """What the upstream says to a job with an adapter, until it is over."""
        request = self.upstream.request(job, await self.upstream.chosen(adapter))
        async with aclosing(self._chunks(request)) as chunks:
            async for chunk in chunks:
                heard = self.upstream.heard(chunk, job)
                yield heard
                if heard.last:
                    return

    async def _chunks(self, request: Json) -> AsyncGenerator[Chunk, None]:
        """The upstream's events, parsed; its refusals as ours."""
        async with self._client.stream("POST", self.upstream.path, json=request) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refusal(response, self.url, self.upstream.remedy)
            lines = response.aiter_lines() if request["stream"] else _whole(response)
            async for line in lines:
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk: Chunk = json.loads(data)
                if "error" in chunk:
                    raise ApiError(502, f"the upstream {self.url} failed: {chunk['error']}.")
                yield chunk


async def _whole(response: httpx.Response) -> AsyncIterator[str]:
    """An answer in one piece, as if it were the only event of a stream."""
    yield f"data:{(await response.aread()).decode()}"


def _refusal(response: httpx.Response, url: str, remedy: str) -> ApiError:
    """A request it finds wrong, or too many of them, is the client's; anything else is a bad gateway."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    status = response.status_code if response.status_code in (400, 429) else 502
    hint = f"; {remedy}" if response.status_code == 404 else ""
    return ApiError(status, f"the upstream {url} refuses ({response.status_code}): {message}{hint}")
