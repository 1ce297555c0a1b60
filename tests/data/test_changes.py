"""``data.changes``: who has which rows in which round."""

from collections import Counter

import pytest

from fedweave.config import from_tree
from fedweave.data import load_data
from fedweave.data.changes import new_kinds, too_late, vanishing_kinds
from fedweave.errors import UserError

SIZES = {"clients": 4, "train": 20, "validation": 2, "test": 2, "alpha": 1.0}


def load(*changes: str, seed: int = 0):
    return load_data(from_tree({"seed": seed, "data": {**SIZES, "changes": list(changes)}}))


def held(data, name: str, number: int) -> Counter:
    """Rows of a client by task from a round on."""
    course = data.courses.get(name)
    if course is None:
        return Counter(e.task for e in data.clients[name])
    last = max(n for n in course.here if n <= number)
    return Counter(course.rows[i].task for i in course.here[last])


def test_a_kind_that_comes_later_is_nobodys_before():
    data = load("3: client_0, client_2 gain sum")
    assert all("sum" not in held(data, name, 2) for name in data.clients)
    assert [held(data, name, 3)["sum"] for name in data.clients] == [10, 0, 10, 0]
    assert list(data.courses) == ["client_0", "client_2"]
    origins = [e.origin for course in data.courses.values() for e in course.rows if e.task == "sum"]
    assert len(set(origins)) == 20, "every row reaches one client, once"
    assert {e.task for e in data.validation} == {"edit", "sum", "mood", "choice"}, (
        "it is validated on from the start"
    )


def test_what_clients_have_in_the_end_depends_on_how_long_it_lasts():
    data = load("2: client_0 gains sum", "3: all lose mood")
    for rounds, sums, moods in (
        (0, False, True),
        (1, False, True),
        (2, True, True),
        (3, True, False),
        (9, True, False),
    ):
        rows = data.after(rounds)
        assert list(rows) == list(data.clients)
        assert (("sum" in {e.task for e in rows["client_0"]}), any(e.task == "mood" for e in rows["client_0"])) == (
            sums, moods and any(e.task == "mood" for e in data.clients["client_0"]),
        )  # fmt: skip
    assert load().after(3) == load().clients


def test_rows_that_are_there_keep_their_order_and_a_lost_kind_is_gone():
    data = load("3: client_0 gains sum", "5: all lose mood")
    course = data.courses["client_0"]
    assert course.here[0] == course.here[3][: len(course.here[0])]
    assert set(course.here[5]) < set(course.here[3])
    assert all(held(data, name, 5)["mood"] == 0 for name in data.clients)
    assert sum(held(data, name, 4)["mood"] for name in data.clients) == 20


def test_a_share_of_a_known_kind_comes_later():
    data = load("4: all gain 40% of edit")
    before, after = (sum((held(data, name, t) for name in data.clients), Counter()) for t in (1, 4))
    assert before == {"edit": 12, "sum": 20, "mood": 20, "choice": 20} and after["edit"] == 20


def test_a_change_before_round_one_is_how_it_begins():
    data = load("1: client_1 gains sum")
    assert Counter(e.task for e in data.clients["client_1"])["sum"] == 20 and not data.courses


def test_the_manifest_tells_schedules_apart():
    first, second = load("3: client_0 gains sum"), load("4: client_0 gains sum")
    assert first.manifest["clients"] == second.manifest["clients"]
    assert first.manifest["fingerprint"]["clients"] != second.manifest["fingerprint"]["clients"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("soon: client_0 gains sum", "not of the form"),
        ("3: client_9 gains sum", "no client 'client_9'"),
        ("3: client_0 gains poems", "no kind 'poems' in the data"),
        ("3: client_0 and client_1 gain sum", "no client 'and'; valid: .*all"),
        ("0: client_0 gains sum", "rounds count from 1"),
        ("3: all gain 200% of sum", "up to 100 %"),
        ("3: all gain 0% of sum", "more than 0"),
        ("3: all lose 40% of sum", "leave out '40% of'"),
        ("3: all gain 10% of sum", "2 rows for 4 clients"),
    ],
)
def test_a_mistake_is_one_sentence(change, reason):
    with pytest.raises(UserError, match=reason):
        load(change)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["3: client_0 gains sum", "3:  client_0 gains sum"], "stands there twice"),
        (["3: client_0 gains sum", "3: client_0 gain sum"], "'3: client_0 gain sum' stands there twice"),
        (
            ["2: client_0 gains 60% of sum", "3: all gain 60% of sum"],
            "'3: all gain 60% of sum': with it 120% of the rows of sum are gained; lower a share",
        ),
        (["3: all lose sum", "5: client_1 loses sum"], "no client of these has rows of sum then"),
        (["3: client_0 gains sum", "2: all lose sum"], "no client of these has rows of sum then"),
        (
            [f"1: client_3 loses {kind}" for kind in ("edit", "mood", "choice")],
            "'client_3' without rows .*'1: client_3 loses mood'",
        ),
        ([f"2: client_0 gains {kind}" for kind in ("edit", "sum", "mood", "choice")], "leave 0 rows for 4 clients"),
    ],
)
def test_lines_that_do_not_go_together_are_one_sentence(changes, reason):
    with pytest.raises(UserError, match=reason):
        load(*changes)


def test_a_change_that_the_run_never_comes_to_is_told():
    texts = ["4: all lose mood", "9: client_0 gains sum"]
    assert "ends after round 8, before '9: client_0 gains sum'; what would come" in too_late(texts, 8)
    assert too_late(texts, 9) == ""


def test_everybody_is_everybody_whoever_else_is_named():
    assert load("3: all, client_0 lose mood").courses == load("3: all lose mood").courses


def test_a_line_that_yaml_reads_as_something_else_says_how_to_write_it():
    """As in a file: - 3: all lose mood"""
    with pytest.raises(UserError, match="needs quotes: '3: all lose mood'"):
        from_tree({"data": {"changes": [{3: "all lose mood"}]}})


def test_own_rows_have_no_schedule(tmp_path):
    with pytest.raises(UserError, match="needs data"):
        from_tree({"data": {"source": "jsonl", "path": str(tmp_path), "changes": ["3: all lose sum"]}})


def test_new_kinds_are_those_that_nobody_has_in_the_beginning():
    texts = ["4: all gain sum", "3: client_0 gains sum", "5: all gain 40% of edit", "2: all lose mood"]
    assert new_kinds(texts, 10) == {"sum": 3}
    assert new_kinds(texts, 2) == {}, "the run ends before"
    assert (vanishing_kinds(texts, 2), vanishing_kinds(texts, 1)) == ({"mood"}, set())
