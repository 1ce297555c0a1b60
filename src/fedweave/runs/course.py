"""What a run makes of its validation losses: it remembers its best state and, with ``training.patience``, notices
when it gets no better.

After so many rounds without a better loss it goes back to its best state and on at half of its rates. When that has
happened :data:`HALVINGS` times in a row without a gain, it ends where it would go back once more. All processes of
a run hold its state, so all of them follow what the first one, which measures, has decided.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from fedweave.events import SetbackEvent
from fedweave.federation.engines.base import Engine
from fedweave.federation.engines.distributed import world
from fedweave.federation.message import Message
from fedweave.runs.folder import Progress

HALVINGS = 3  # an eighth of the rates: below that hardly anything moves
BETTER, ON, BACK, END = "better", "on", "back", "end"


def ended(progress: Progress) -> bool:
    """Whether halving has not helped: no round comes any more."""
    return progress.setbacks > HALVINGS


def rounds_left(progress: Progress, rounds: int) -> Iterator[int]:
    """The rounds still to come."""
    return takewhile(lambda t: not ended(progress), range(progress.completed, rounds))


def renew(progress: Progress) -> None:
    """The data have changed: what was best on other data is not compared with what comes."""
    progress.best, progress.best_round, progress.best_loss = progress.state, progress.completed, float("inf")
    progress.since, progress.setbacks = progress.completed, 0


def judge(progress: Progress, loss: float, better: bool, patience: int) -> str:
    """What a validation loss means for the run."""
    if better:
        progress.best_loss = loss
        return BETTER
    if not patience or progress.completed - progress.since < patience:
        return ON
    return BACK if progress.setbacks < HALVINGS else END


def agreed(verdict: str | None) -> str:
    """The first process's verdict, known to all; the others have none."""
    processes = world()
    if processes is None:
        assert verdict is not None
        return verdict
    return processes.pass_on(0, None if verdict is None else Message(facts={"verdict": verdict})).facts["verdict"]


def follow(progress: Progress, verdict: str, engine: Engine) -> None:
    """Do as the verdict says. What the server knows of its clients is remembered, wherever the run goes."""
    if verdict == BETTER:
        progress.best, progress.best_round = progress.state, progress.completed
    if verdict != ON:
        progress.since, progress.setbacks = progress.completed, 0 if verdict == BETTER else progress.setbacks + 1
    if verdict == BACK:
        state = progress.state
        progress.state = replace(
            progress.best,
            norms=state.norms,
            standing=state.standing,
            doubts=state.doubts,
            bucket_doubts=state.bucket_doubts,
            pace=state.pace / 2,
        )
        engine.go_back(progress.best.private)


def setback(progress: Progress, verdict: str) -> SetbackEvent:
    return {
        "event": "setback", "round": progress.completed, "best_round": progress.best_round,
        "pace": progress.state.pace, "ended": verdict == END,
    }  # fmt: skip


def setback_text(event: SetbackEvent, loss: float) -> str:
    """The same in words; ``loss`` is the best one."""
    seen = f"no validation loss below the {loss:.3f} of round {event['best_round']} by round {event['round']}"
    if event["ended"]:
        return f"{seen}, and {HALVINGS} times at half of the rates did not help: the run ends early."
    return f"{seen}: the run goes back to round {event['best_round']}, and on at {event['pace']:g} of its rates."
