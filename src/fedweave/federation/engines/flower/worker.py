"""A site's worker: it holds the data and the model and answers what its SuperNode receives."""

import shlex
import signal

from flwr.app import Message as FlowerMessage

from fedweave.config import BackboneConfig, Config
from fedweave.console import Console
from fedweave.federation.engines.flower.launch import SuperNode
from fedweave.federation.engines.flower.switches import hush
from fedweave.federation.engines.flower.tasks import answer_messages
from fedweave.federation.engines.flower.transport import from_records, to_records
from fedweave.federation.site.settings import SiteConfig
from fedweave.federation.site.site import BuildMethod, Models, Site
from fedweave.federation.site.source import OwnFiles


def work(site: SiteConfig, build_method: BuildMethod, console: Console, own_supernode: bool) -> None:
    """Answer until the process is stopped. With ``own_supernode`` the SuperNode is a child, and is started again
    whenever it ends; without, somebody else runs one with the same port and secret."""
    hush()
    source = OwnFiles(site)
    source.rows(Config(), 0)  # rows that cannot be read show here, before a federation waits for them
    node = SuperNode(site, console)
    models = Models()
    answering = Site(source, models, build_method, console)

    runs: list[int] = []  # the one that this SuperNode has seen

    def answer(message: FlowerMessage) -> FlowerMessage:
        if own_supernode and runs and runs[0] != message.metadata.run_id:
            runs.clear()
            node.renew()
            raise RuntimeError("the SuperNode was started anew for another run; the question will be asked again")
        runs[:] = [message.metadata.run_id]
        reply = answering.answer(lambda: from_records(message.content))
        console.say(f"{reply.facts.get('step', 'no answer')}: sent {reply.size / 1e6:.2f} MB of arrays")
        return FlowerMessage(to_records(reply), reply_to=message)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
