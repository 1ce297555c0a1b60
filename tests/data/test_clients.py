"""How much a held-out row counts for each client."""

import numpy as np

from fedweave.data.clients import ClientWeights
from fedweave.data.examples import Example


def rows(*tasks, client=""):
    return [Example("x", "y", task, "", client=client) for task in tasks]


def test_rows_kept_back_from_a_client_speak_for_it_alone():
    held = [*rows("a", client="north"), *rows("a", "b", client="south")]
    found = ClientWeights({"north": rows("a"), "south": rows("a"), "small": rows("b")}, held)
    assert found.of("north").tolist() == [1, 0, 0] and found.of("south").tolist() == [0, 0.5, 0.5]
    assert found.of("small").tolist() == [0, 0, 0], "too small to hold a row back"


def test_a_common_set_speaks_by_the_mixture_of_tasks():
    held = rows("a", "b", "b")
    found = ClientWeights({"mixed": rows("a", "a", "a", "b"), "pure": rows("b"), "other": rows("c")}, held)
    np.testing.assert_allclose(found.of("mixed"), [0.75, 0.125, 0.125])
    np.testing.assert_allclose(found.of("pure"), [0, 0.5, 0.5])
    assert not found.of("other").any()
