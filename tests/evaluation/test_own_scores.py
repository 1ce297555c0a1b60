"""Metrics of own data: a perfect answer scores 1 in any language, a wrong one does not."""

import zlib

import pytest

from fedweave.config import Config, from_tree
from fedweave.data.examples import Example
from fedweave.data.own_tasks import NAMES, own_tasks
from fedweave.errors import UserError
from fedweave.metrics.scores import METRICS, rouge, rouge_unicode, scores
from fedweave.metrics.scripts import scripts, words

# language: (one word, a sentence, another sentence)
LANGUAGES = {
    "English": ("yes", "The train leaves at nine.", "Nobody knows his name."),
    "German": ("Süden", "Der Zug fährt um neun Uhr ab.", "Keiner weiß, wie er heißt."),
    "French": ("été", "Le train part à neuf heures.", "Personne ne sait où c'est."),
    "Chinese": ("北京", "火车九点钟出发。", "没有人知道他的名字。"),
    "Japanese": ("はい", "電車は九時に出発します。", "誰も彼の名前を知らない。"),
    "Korean": ("예", "기차는 아홉 시에 출발합니다.", "아무도 그의 이름을 모른다."),
    "Russian": ("да", "Поезд отправляется в девять часов.", "Никто не знает его имени."),
    "Arabic": ("نعم", "يغادر القطار في الساعة التاسعة.", "لا أحد يعرف اسمه."),
    "Greek": ("ναι", "Το τρένο φεύγει στις εννέα.", "Κανείς δεν ξέρει πού είναι."),
    "Hindi": ("हाँ", "ट्रेन नौ बजे निकलती है।", "कोई उसका नाम नहीं जानता।"),
    "Thai": ("ใช่", "รถไฟออกเวลาเก้าโมง", "ไม่มีใครรู้จักชื่อของเขา"),
    "Hebrew": ("כן", "הרכבת יוצאת בשעה תשע.", "איש אינו יודע את שמו."),
    "no words": ("👍", "👍 👍🏽 !!", "🙁 ?"),
}
TEXT_METRICS = ["exact", "label", "f1", "rouge", "chrf"]


def score(metric: str, prediction: str, reference: str, labels=()) -> float:
    if metric == "chrf":
        pytest.importorskip("sacrebleu", reason="sacrebleu is not installed: pip install 'fedweave[chrf]'")
    (value,) = scores(NAMES[metric], [prediction], [reference], "rouge-score", labels)
    return value


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("metric", TEXT_METRICS)
def test_a_perfect_answer_scores_1_and_another_less(language, metric):
    word, sentence, other = LANGUAGES[language]
    for right in (word, sentence):
        assert score(metric, right, right, [word, sentence, other]) == pytest.approx(1.0)
        assert score(metric, other, right, [word, sentence, other]) < 0.5
        assert score(metric, "", right, [word, sentence, other]) == 0.0


@pytest.mark.parametrize("language", LANGUAGES)
def test_so_it_does_by_the_metric_that_is_chosen_without_asking(language):
    for answer in LANGUAGES[language]:
        tasks, notes = own_tasks(Config(), [Example("q", answer, "all", "a.jsonl:1")])
        assert scores(tasks["all"].metric, [answer], [answer], "rouge-score") == [pytest.approx(1.0)]
        assert len(notes) == 1


def test_composed_and_decomposed_letters_are_the_same():
    for metric in ("exact", "label", "f1", "rouge"):
        assert score(metric, "caf\u00e9 fran\u00e7ais", "cafe\u0301 franc\u0327ais") == 1.0


def test_marks_stay_with_their_letters():
    assert words("हिन्दी में") == ["हिन्दी", "में"]
    assert words("Don't_stop, Café—2nd!") == ["don", "t", "stop", "café", "2nd"]
    assert words("東京 Tower") == ["東", "京", "tower"]


# -------------------------------------------------------------------------------------- against the packages


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("The cat sat on the mat.", "the CAT sat, on a mat"),
        ("One line.\nAnd two_three 4.", "One line here.\nAnd then two three 4!"),
        ("", "some words"),
        ("of no use", "some words"),
    ],
)
def test_of_english_rouge_is_that_of_the_package(prediction, reference):
    assert rouge_unicode(prediction, reference) == rouge(prediction, reference)


def test_a_single_word_goes_without_pairs_of_words():
    assert rouge("yes", "yes") == pytest.approx(2 / 3)  # what the paper's tasks are scored with stays
    assert rouge_unicode("yes", "yes") == 1.0
    assert rouge_unicode("yes indeed", "yes") == pytest.approx(2 / 3)


def test_the_papers_rouge_still_reads_a_to_z_alone():
    assert METRICS["rouge"]("Привет мир", "Привет мир") == 0.0
    assert METRICS["rouge"]("caf\u00e9 x", "caf\u00e8 x") == pytest.approx(1.0)


def test_chrf_is_that_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    pair = ("Der Zug fährt um neun.", "Der Zug fährt um zehn Uhr ab.")
    assert score("chrf", *pair) == pytest.approx(sacrebleu.sentence_chrf(pair[0], [pair[1]]).score / 100)


# -------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("spam", "spam"),
        ("It is SPAM.", "spam"),
        ("not spam", "not spam"),  # begins earlier than the spam in it
        ("I would say: not spam, although it looks like spam", "not spam"),
        ("spam? no, not spam", "spam"),
        ("unsure", None),
        ("spammy", None),
        ("这是垃圾邮件", "垃圾邮件"),  # no blanks around it
    ],
)
def test_the_first_label_counts(prediction, right):
    labels = ("spam", "not spam", "垃圾邮件")
    assert [score("label", prediction, label, labels) for label in labels] == [float(x == right) for x in labels]


# -------------------------------------------------------------------------------------- a function of one's own


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Call with Python text to write it as a module of the current folder; gives the module's name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        name = f"metrics_{zlib.crc32(text.encode())}"  # modules are imported once in a process
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def own(metric: str, prediction: str, reference: str) -> float:
    config = from_tree({"evaluation": {"metrics": metric}})
    tasks, _ = own_tasks(config, [Example("q", reference, "all", "a.jsonl:1")])
    return scores(tasks["all"].metric, [prediction], [reference], "rouge-score")[0]


def test_a_function_of_the_config_scores(module):
    name = module("def half(prediction, reference):\n    return 1 if prediction == reference else 0.5\n")
    assert own(f"{name}:half", "x", "x") == 1.0
    assert own(f"all={name}:half", "y", "x") == 0.5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("score = 3", "is no function"),
        ("def other(a, b): return 1", "cannot be loaded (AttributeError"),
        ("def score(", "cannot be loaded (SyntaxError"),
        ("raise SystemExit(3)", "cannot be loaded (SystemExit"),
        ("def score(a): return 1", "fails on the answer 'x' to 'x' (TypeError"),
        ("def score(a, b): return 1 / 0", "(ZeroDivisionError"),
        ("def score(a, b): return 55.5", "must give a number between 0 and 1, not 55.5"),
        ("def score(a, b): return None", "must give a number between 0 and 1, not None"),
        ("def score(a, b): return float('nan')", "must give a number between 0 and 1, not nan"),
    ],
)
def test_whatever_is_wrong_with_it_is_one_sentence_before_the_run(module, text, complaint):
    name = module(text)
    with pytest.raises(UserError) as caught:
        own(f"{name}:score", "x", "x")
    assert complaint in str(caught.value) and str(caught.value).startswith(f"evaluation.metrics: {name}:score")


@pytest.mark.parametrize("name", ["no_such_module:score", ":score", "os:", "a b:c"])
def test_a_name_that_leads_nowhere_is_one_sentence(name):
    with pytest.raises(UserError, match="cannot be loaded"):
        own(name, "x", "x")


def test_scripts_are_counted_by_their_letters():
    assert scripts(["abc 123", "где"]) == {"Latin": 0.5, "Cyrillic": 0.5}
    assert list(scripts(["東京タワー是", "x", ""])) == ["Han", "Katakana", "Latin"]
    assert scripts(["123 !", ""]) == {}
