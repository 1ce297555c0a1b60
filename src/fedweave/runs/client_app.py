"""The Flower ClientApp. In a simulation the site lives here; in a deployment its worker answers instead of it."""

from pathlib import Path

from flwr.app import Context
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedweave.console import Console
from fedweave.federation.engines.flower.transport import from_records, to_records
from fedweave.federation.message import Message
from fedweave.federation.site.site import Models, Site, read_config
from fedweave.federation.site.source import Share
from fedweave.methods import build_method

app = ClientApp()
_models = Models()  # one backbone for all simulated sites of this process
_sites: dict[int, Site] = {}


@app.query()
def answer(message: FlowerMessage, context: Context) -> FlowerMessage:
    question = from_records(message.content)
    partition = context.node_config.get("partition-id")
    if partition is None:
        reply = Message.silent("its SuperNode has no fedweave worker; start it with `fedweave site start`")
    else:
        reply = _simulated(question, int(partition))
    return FlowerMessage(to_records(reply), reply_to=message)


def _simulated(question: Message, partition: int) -> Message:
    """Client ``partition`` of the config in the question, kept as long as this process lives."""
    import torch

    torch.set_num_threads(1)
    config = read_config(question)
    site = _sites.get(partition)
    if site is None or not isinstance(site.source, Share) or site.source.config != config:
        # a client may be asked in another of Ray's processes the next time: what it keeps is in the run's folder
        kept = Path(question.facts["federation"]) / "sites" / str(partition) if config.lives else None
        site = Site(Share(config, partition, kept), _models, build_method, Console(quiet=True))
        _sites[partition] = site
    try:
        return site.answer(question)
    finally:
        site.rest()
