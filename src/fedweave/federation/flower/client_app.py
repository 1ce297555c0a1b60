"""The Flower ClientApp. In a simulation the site lives here; in a deployment its worker answers instead of it."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedweave.federation.flower.records import from_records, to_records
from fedweave.federation.letters import Letter

app = ClientApp()
_sites: dict[int, object] = {}  # simulated sites of this process
_models: list[object] = []  # and the backbone that they share


def _answer(message: Message, context: Context) -> Message:
    letter = from_records(message.content)
    partition = context.node_config.get("partition-id")
    if partition is None:
        reply = Letter(facts={"error": "its SuperNode has no fedweave worker; start it with `fedweave site start`"})
    else:
        reply = _simulated(letter, int(partition))
    return Message(to_records(reply), reply_to=message)


def _simulated(letter: Letter, partition: int) -> Letter:
    """Client ``partition`` of the config in the letter, kept as long as this process lives."""
    import torch

    from fedweave.console import Console
    from fedweave.federation.site.answers import Models, Site, read_config
    from fedweave.federation.site.sources import Share

    if not _models:
        _models.append(Models())
        torch.set_num_threads(1)
    config = read_config(letter)
    site = _sites.get(partition)
    if not isinstance(site, Site) or not isinstance(site.source, Share) or site.source.config != config:
        models = _models[0]
        assert isinstance(models, Models)
        site = _sites[partition] = Site(Share(config, partition), models, Console(quiet=True))
    try:
        return site.answer(letter)
    finally:
        site.rest()


app.query()(_answer)
app.train()(_answer)
app.evaluate()(_answer)
