"""Words that set groups apart, in any script."""

from fedweave.description.words import distinctive, terms


def test_words_of_spaced_scripts_and_pairs_of_the_others():
    assert terms("Ada's 12 Äpfel, 3b") == {"ada", "äpfel", "3b"}
    assert terms("今天天气") == {"今天", "天天", "天气"}
    assert terms("Wetter: 天气 в Москве") == {"wetter", "天气", "москве"}
    assert terms("กำลัง") == {"กำ", "ำลั", "ลัง"} or len(terms("กำลัง")) >= 2, "a mark stays with its letter"
    assert terms("CAFE\u0301") == terms("café")


def test_what_stands_in_all_groups_sets_none_apart():
    groups = [
        [f"please fix the grammar of sentence {i}" for i in range(20)],
        [f"please add the numbers {i} and {i + 1}" for i in range(20)],
        ["请问今天的天气怎么样" for _ in range(20)],
    ]
    fix, add, weather = distinctive(groups)
    assert set(fix) == {"fix", "grammar", "of", "sentence"} and set(add) == {"add", "and", "numbers"}
    assert "天气" in weather and not {"please", "the"} & {*fix, *add, *weather}


def test_what_is_also_elsewhere_ranks_behind_what_is_here_alone():
    mostly = ["the mood"] * 50
    first, second, _ = distinctive([mostly, ["the list", *["list"] * 49], ["how many"] * 50])
    assert first == ["mood", "the"] and second == ["list"]


def test_a_word_of_one_prompt_is_not_told():
    """It says nothing of the expert, and may be a name."""
    groups = [["ask mr hansen about it", *["ask about it"] * 9], ["add these"] * 10]
    assert "hansen" not in distinctive(groups)[0] and "ask" in distinctive(groups)[0]


def test_one_group_or_no_words_has_nothing_to_tell():
    assert distinctive([["fix it"] * 9]) == [[]]
    assert distinctive([["1 2"], ["?"], []]) == [[], [], []]
