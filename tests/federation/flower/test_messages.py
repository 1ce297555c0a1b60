"""What leaves a site, from the messages themselves: nothing of its rows, features, buckets or labels."""

import json

import numpy as np
import torch

from fedweave.federation.flower.records import from_records, to_records
from fedweave.federation.letters import Letter
from tests.federation.flower.conftest import Federation
from tests.federation.flower.test_one_truth import changed

# Everything that docs/deploying.md says may leave a site, and nothing else.
MAY_LEAVE = {
    "hello": {"name", "version", "fingerprint", "backbone", "tokenizer", "width", "layers", "inputs", "outputs"},
    "discover": {"signatures", "sizes", "note", "tried", "silhouettes", "assignment"},
    "start": {"expert.*", "experts", "buckets"},
    "warm": {"router", "samples"},
    "train": {"expert.*", "router", "t", "counts", "samples", "losses", "tokens", "backbone", "tokenizer"},
    "evaluate": {"total", "entropy", "count"},
}


def named(name: str) -> str:
    return "expert.*" if name.startswith("expert.") else name


def test_only_the_listed_things_leave_a_site_and_none_of_them_is_a_row(config, models):
    federation = Federation(changed(config), models)
    federation.engine.losses(federation.run()[1], 2)
    clients = [site._seat[1].client for site in federation.sites]
    asked, seen, up = {}, set(), 0
    for way, node, letter in federation.grid.sent:
        if way == "down":
            asked[node] = letter.facts["step"]
            continue
        seen.add(asked[node])
        assert {named(n) for n in [*letter.arrays, *letter.facts]} <= MAY_LEAVE[asked[node]], asked[node]
        client, text = clients[node - 100], json.dumps(letter.facts)
        up += letter.array_bytes
        for example in client.data.examples[:5]:
            assert not any(_holds(array, example.ids) for array in letter.arrays.values())
        for array in letter.arrays.values():
            flat = torch.from_numpy(np.asarray(array, dtype=np.float32)).flatten()
            for feature in client.data.features[:5]:  # no stretch of an array is a feature
                if len(flat) >= len(feature):
                    windows = flat.unfold(0, len(feature), 1)
                    assert (windows - feature).abs().sum(1).min() > 1e-3
        assert str(client.buckets[0].tolist())[1:-1] not in text, "no list of a bucket's members"
    assert seen == set(MAY_LEAVE) and up > 0


def _holds(array: np.ndarray, ids) -> bool:
    flat, ids = np.asarray(array).ravel(), np.asarray(ids)
    return any(np.array_equal(flat[i : i + len(ids)], ids) for i in range(len(flat) - len(ids) + 1))


def test_the_server_tells_sites_no_path_of_its_own(config, models):
    federation = Federation(changed(config), models)
    from fedweave.federation.flower.engine import public

    told = public(federation.config)
    assert told.output is None and told.backbone.model != config.backbone.model


def test_letters_survive_flower_and_bytes():
    letter = Letter(
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([-3, 4], dtype=np.int8)},
        {"n": 3, "x": [1.5, 2.0], "none": [], "text": "ä", "yes": True, "words": ["a", "b"]},
    )
    for back in (from_records(to_records(letter)), Letter.from_bytes(letter.to_bytes())):
        assert back.facts == letter.facts
        assert all(
            np.array_equal(back.arrays[k], a) and back.arrays[k].dtype == a.dtype for k, a in letter.arrays.items()
        )
