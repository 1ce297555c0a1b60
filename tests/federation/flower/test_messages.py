"""What leaves a site, from the messages themselves: nothing of its rows, features, buckets or labels."""

import json

import numpy as np
import torch

from fedweave.federation.engines.flower.engine import public
from fedweave.federation.engines.flower.transport import from_records, to_records
from fedweave.federation.message import Message
from fedweave.federation.state import broadcast
from fedweave.methods import build_method
from tests.federation.flower.conftest import Federation
from tests.federation.flower.test_one_truth import changed

# Everything that docs/deploying.md says may leave a site, and nothing else.
HEADER = {"step", "t", "backbone", "tokenizer"}
MAY_LEAVE = {
    "hello": {"name", "version", "fingerprint", "width", "layers", "inputs", "outputs"},
    "discover": {"signatures", "sizes", "note", "tried", "silhouettes"},
    "start": {"expert.*", "experts", "buckets"},
    "warm": {"router", "samples"},
    "moments": {"sums", "products", "samples"},
    "distances": {"counts"},
    "train": {"expert.*", "router", "counts", "samples", "losses", "tokens"},
    "evaluate": {"total", "entropy", "count"},
}


def named(name: str) -> str:
    return "expert.*" if name.startswith("expert.") else name


def test_only_the_listed_things_leave_a_site_and_none_of_them_is_a_row(config, models):
    federation = Federation(changed(config), models)
    engine, final = federation.engine, federation.run()[1]
    losses = engine.ask(build_method(federation.config).evaluate, engine.members, broadcast(final, 2))
    assert [loss.count > 0 for _, loss in losses] == [True] * 3
    clients = [site.session.client for site in federation.sites]
    asked, seen, up = {}, set(), 0
    for way, node, message in federation.grid.sent:
        if way == "down":
            asked[node] = message.facts["step"]
            continue
        seen.add(asked[node])
        told = {named(n) for n in [*message.tensors, *message.facts]}
        assert told <= MAY_LEAVE[asked[node]] | HEADER, asked[node]
        client, text = clients[node - 100], json.dumps(message.facts)
        up += message.size
        for tensor in message.tensors.values():
            flat = tensor.float().flatten()
            for example in client.data.examples[:5]:
                assert not _holds(flat, torch.tensor(np.asarray(example.ids), dtype=torch.float32))
            for feature in client.data.features[:5]:  # no stretch of a tensor is a feature
                if len(flat) >= len(feature):
                    windows = flat.unfold(0, len(feature), 1)
                    assert (windows - feature).abs().sum(1).min() > 1e-3
        assert str(client.buckets[0].tolist())[1:-1] not in text, "no list of a bucket's members"
    assert seen == set(MAY_LEAVE) and up > 0


def _holds(flat: torch.Tensor, ids: torch.Tensor) -> bool:
    return len(flat) >= len(ids) and bool((flat.unfold(0, len(ids), 1) == ids).all(1).any())


def test_the_server_tells_sites_no_path_of_its_own(config):
    told = public(changed(config))
    assert told.output is None and told.backbone.model != config.backbone.model


def test_messages_survive_flower_and_bytes():
    message = Message(
        {
            "a": torch.arange(6.0).reshape(2, 3),
            "b": torch.tensor([-3, 4], dtype=torch.int8),
            "c": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        },
        {"n": 3, "x": [1.5, 2.0], "none": [], "text": "ä", "yes": True, "words": ["a", "b"]},
    )
    for back in (from_records(to_records(message)), Message.from_bytes(message.to_bytes())):
        assert back.facts == message.facts
        assert all(
            torch.equal(back.tensors[k], t) and back.tensors[k].dtype == t.dtype for k, t in message.tensors.items()
        )
