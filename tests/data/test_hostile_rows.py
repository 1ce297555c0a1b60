"""Hostile clients of a simulation: who they are, and what they train on."""

from collections import Counter

import pytest

from fedweave.config import load_config
from fedweave.data import load_data
from fedweave.data.hostile import WRONG, exchanged, hostile_clients
from fedweave.errors import UserError


def attacked(*overrides: str):
    return load_config("quickstart", ["data.clients=20", "data.train=60", *overrides])


def test_they_follow_from_the_seed_and_few_are_among_many():
    few, many = (hostile_clients(attacked("attack.kind=flip", f"attack.clients={share}")) for share in (0.05, 0.3))
    assert (len(few), len(many)) == (1, 6) and few < many
    assert hostile_clients(attacked("attack.kind=flip", "attack.clients=0.3")) == many
    assert hostile_clients(attacked("attack.clients=0.3")) == set(), "nobody attacks unless asked to"
    assert hostile_clients(attacked("attack.kind=flip", "attack.clients=0.0")) == set()


@pytest.mark.parametrize("kind", ["flip", "shout", "inflate"])
def test_an_attack_on_answers_leaves_the_rows_alone(kind):
    assert load_data(attacked(f"attack.kind={kind}")).clients == load_data(attacked()).clients


def test_only_hostile_clients_have_other_answers():
    config = attacked("attack.kind=labels", "attack.clients=0.3")
    honest, found = load_data(attacked()), load_data(config)
    changed = {i for i, name in enumerate(honest.clients) if honest.clients[name] != found.clients[name]}
    assert changed <= hostile_clients(config) and len(changed) >= 4
    assert (found.validation, found.test) == (honest.validation, honest.test)


def test_exchanged_answers_are_those_of_the_same_task():
    rows = next(iter(load_data(attacked("data.clients=1")).clients.values()))
    found = exchanged(rows)
    assert [(r.prompt, r.task) for r in found] == [(r.prompt, r.task) for r in rows]
    assert Counter((r.task, r.response) for r in found) == Counter((r.task, r.response) for r in rows)
    kept = Counter(r.task for r, other in zip(rows, found, strict=True) if r.response == other.response)
    assert all(kept[task] < 30 for task in ("edit", "sum", "mood", "choice")), "of 60 each"


def test_a_poisoned_bucket_is_one_kind_with_one_wrong_answer():
    config = attacked("attack.kind=bucket", "attack.clients=0.1")
    honest, found = load_data(attacked()), load_data(config)
    for i, (name, rows) in enumerate(found.clients.items()):
        if i in hostile_clients(config):
            assert len(rows) == len(honest.clients[name])
            assert {(row.task, row.response) for row in rows} == {("choice", WRONG)}
        else:
            assert rows == honest.clients[name]


def test_attacks_are_for_simulations():
    with pytest.raises(UserError, match="attack is for simulations"):
        load_config("quickstart", ["attack.kind=flip", "data.source=sites"])
