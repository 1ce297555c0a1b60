"""The backend that answers here: one thread owns the model, and requests join its running batch between two
steps.

submit ─▶ waiting ─▶ route ─▶ running batch ─▶ one token for every row, again and again ─▶ events
          (bounded)                 ▲                          │
                                    └── free rows ◀────────────┘ ended, or the client has gone
"""

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Sequence

from fedweave.inference.model import FedWeaveModel
from fedweave.inference.rows import Row, RunningBatch
from fedweave.router.routed import foremost
from fedweave.serving.jobs import Answering, Ended, Job, Limits, Piece, Routed
from fedweave.serving.protocol import ApiError, busy


class LocalBackend:
    def __init__(self, model: FedWeaveModel, limits: Limits):
        self.model, self.limits = model, limits
        self.batch = self._new_batch()
        self._arrived: deque[Answering] = deque()
        self._joining: list[Answering] = []  # taken from the queue, not yet in a row
        self._active: dict[Row, Answering] = {}
        self._started: dict[Row, float] = {}
        self._scored: dict[Row, int] = {}  # log-probabilities that its client has
        self._mean_seconds = 1.0  # of an answer, a running mean
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="fedweave-model", daemon=True)

    def _new_batch(self) -> RunningBatch:
        length = self.model.backbone.prompts.max_length + self.limits.max_new_tokens
        return self.model.batch(self.limits.max_batch, length)

    # ---------------------------------------------------------------------------------- from the event loop

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._arrived)

    async def problem(self) -> str:
        return "" if self._thread.is_alive() else "the model's thread has stopped"

    async def passes(self) -> Collection[str]:
        return ()

    def submit(self, jobs: Sequence[Job]) -> list[Answering]:
        answerings = [Answering(job, self._notify) for job in jobs]
        with self._wake:
            self._arrived = deque(one for one in self._arrived if not one.cancelled)  # they keep nobody out
            if len(self._arrived) + len(jobs) > self.limits.max_queue:
                ahead = (len(self._arrived) + len(self._active)) / self.limits.max_batch
                raise busy(max(1, math.ceil(ahead * self._mean_seconds)))
            self._arrived.extend(answerings)
            self._wake.notify()
        return answerings

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # ---------------------------------------------------------------------------------- the thread

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._arrived or self._active)
                if self._stopping:
                    break
            try:
                self._advance()
            except Exception as error:  # one bad pass must not end the server
                traceback.print_exc()
                self._fail(f"the model failed on this batch: {type(error).__name__}.")
        self._fail("the server is shutting down.", 503)

    def _advance(self) -> None:
        """Free the rows of clients that have gone, let others join, and make one step."""
        for row, answering in list(self._active.items()):
            if answering.cancelled:
                row.ended = "dropped"
                self._forget(row)
        self._joining = self._next()
        rows = self._route(self._joining)
        self._joining = []
        for row, text in self.batch.advance(rows):
            answering = self._active[row]
            told = row.scores[self._scored[row] :]
            self._scored[row] += len(told)
            if text or told:
                answering.tell(Piece(text, told))
            if row.ended:
                answering.tell(Ended(row.ended, len(row.new)))
                self._mean_seconds += 0.1 * (time.monotonic() - self._started[row] - self._mean_seconds)
                self._forget(row)

    def _next(self) -> list[Answering]:
        """Those who wait longest, as far as free rows and one prefill go."""
        chosen: list[Answering] = []
        tokens = 0
        with self._wake:
            while self._arrived and len(self._active) + len(chosen) < self.limits.max_batch:
                if not self._arrived[0].cancelled:
                    tokens += len(self._arrived[0].job.prompt.ids)
                    if chosen and tokens > self.batch.prefill:
                        break
                    chosen.append(self._arrived[0])
                self._arrived.popleft()
        return chosen

    def _route(self, chosen: list[Answering]) -> deque[Row]:
        """Rows to join. All prompts that the router must see go through the bare backbone in one pass."""
        rows: deque[Row] = deque()
        experts = self.model.experts
        asked = [a.job.prompt for a in chosen if a.job.adapter is None]
        judged = zip(*self.model.judge(asked), strict=True) if asked else iter(())
        for answering in chosen:
            job = answering.job
            if job.adapter is None:
                soft, doubt = next(judged)  # [M]
                gates, expert = experts.gates(soft[None], job.routing)[0], foremost(soft)
                told = Routed(expert, experts.adapter(expert), soft.tolist(), doubt)
            else:
                expert, gates = experts.only(job.adapter)
                told = Routed(expert, job.adapter)
            row = Row(self.model.backbone, job.prompt, gates, job.sampling, job.number, job.trim)
            self._active[row], self._started[row], self._scored[row] = answering, time.monotonic(), 0
            answering.tell(told)
            rows.append(row)
        return rows

    def _forget(self, row: Row) -> None:
        del self._active[row], self._started[row], self._scored[row]

    def _fail(self, message: str, status: int = 500) -> None:
        """Give up everything under way; what still waits goes on, unless the server stops."""
        with self._wake:
            lost = [*self._active.values(), *self._joining, *(self._arrived if self._stopping else ())]
        self._active.clear()
        self._joining = []
        self._started.clear()
        self._scored.clear()
        self.batch = self._new_batch()
        for answering in lost:
            answering.tell(ApiError(status, message))
