"""A site's worker: it holds the data and the model and answers what its SuperNode receives."""

from __future__ import annotations

import shlex
import signal
from types import FrameType

from flwr.app import Message

from fedweave.config import BackboneConfig
from fedweave.console import Console
from fedweave.federation.flower.launch import SuperNode
from fedweave.federation.flower.records import from_records, to_records
from fedweave.federation.flower.switches import hush
from fedweave.federation.flower.tasks import answer_messages
from fedweave.federation.site.answers import Models, Site
from fedweave.federation.site.settings import SiteConfig
from fedweave.federation.site.sources import OwnFiles


def work(site: SiteConfig, console: Console, own_supernode: bool) -> None:
    """Answer until the process is stopped. With ``own_supernode`` the SuperNode is a child, and is started again
    whenever it ends; without, somebody else runs one with the same port and secret."""
    hush()
    source = OwnFiles(site)
    node = SuperNode(site, console)
    models = Models()
    answering = Site(source, models, console)

    def answer(message: Message) -> Message:
        letter = from_records(message.content)
        reply = answering.answer(letter)
        console.say(f"{letter.facts.get('step')}: sent {reply.array_bytes / 1e6:.2f} MB of arrays")
        return Message(to_records(reply), reply_to=message)

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if own_supernode:
            node.start()  # it connects while the model loads
        else:
            console.say(f"the SuperNode of this worker: {shlex.join(node.command())}")
        backbone = models.get(source.backbone(BackboneConfig()))  # a model that cannot be loaded shows here
        console.say(f"site {site.name}: {backbone.name} on {backbone.device}, data {site.data}")
        answer_messages(node.runtime, answer, node.check if own_supernode else lambda: None)
    except KeyboardInterrupt:
        console.say(f"site {site.name} stops.")
    finally:
        if own_supernode:
            node.stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
