"""A site's own floors, which no server can lower: checked before anything is computed, and before it leaves."""

from collections.abc import Sequence

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation import masks
from fedweave.federation.message import Message
from fedweave.federation.site.settings import Floors


class Declined(UserError):
    """Why a site does not answer, in words that say nothing of its data: the server may read them."""


def check_question(floors: Floors, config: Config, question: Message) -> None:
    """Refuse a question that goes below a floor."""
    step, training, discovery = question.facts["step"], config.training, config.discovery
    warm_start = config.router.warm_start.in_shorter_turns if step == "rewarm" else config.router.warm_start
    if floors.questions and step not in floors.questions and step not in masks.NAMES:
        raise Declined(f"this site does not answer {step!r} (floors.questions)")
    for key, asked, least in (
        ("batch", training.batch_size, floors.batch),
        ("batch", discovery.warmup_batch, floors.batch),
        ("batch", warm_start.batch_size, floors.batch),
        ("steps", training.local_steps, floors.steps),
        ("steps", discovery.warmup_steps, floors.steps),
        ("steps", warm_start.steps, floors.steps),
        ("clip", training.clip, floors.clip),
    ):
        if asked < least:
            raise Declined(f"the federation asks for {asked:g}, where this site's floors.{key} is {least:g}")
    if floors.secure and not config.federation.secure_aggregation:
        raise Declined("the federation has no secure aggregation, which this site's floors.secure asks for")
    private, levels = config.privacy, ("none", "example", "client")
    if levels.index(private.level) < levels.index(floors.level):
        raise Declined(
            f"the federation's privacy.level is {private.level}, this site's floors.level {floors.level}"
        )
    if private.level != "none" and private.delta > floors.delta:
        raise Declined(
            f"the federation's privacy.delta is {private.delta:g}, this site's floors.delta {floors.delta:g}"
        )


def check_model(floors: Floors, fingerprint: str) -> None:
    if floors.fingerprint and floors.fingerprint != fingerprint:
        raise Declined("the federation's backbone is not the one of this site's floors.fingerprint")


def check_buckets(floors: Floors, sizes: Sequence[int]) -> None:
    """Refuse to send what a bucket of too few examples has given; copies of a row are one."""
    sizes = [size for size in sizes if size]
    if sizes and min(sizes) < floors.least:
        raise Declined(f"a bucket is smaller than this site's floors.bucket or floors.batch, {floors.least}")
