"""What a bundle tells of its experts: nothing unless asked, and then as much as was asked for."""

from fedweave.bundle.card import _experts
from fedweave.description.record import limited, read_experts, write_experts
from fedweave.runs.use import told_experts
from tests.helpers import read_json


def everything(folder) -> str:
    return "".join(p.read_text(encoding="utf-8") for p in folder.rglob("*") if p.suffix in (".json", ".md"))


def test_without_being_asked_a_bundle_holds_no_word_of_the_data(exported, trained):
    told = everything(exported)
    assert not (exported / "experts.json").exists() and "## Experts" not in told
    assert not [p for e in read_experts(trained)["experts"] for p in e["typical"] if p in told]


def test_a_served_run_tells_what_it_is_allowed_to(trained, exported):
    assert told_experts(trained, None) is None and told_experts(exported, "examples") is None
    assert told_experts(trained, "words") == limited(read_experts(trained), "words")


def test_words_tell_neither_prompts_nor_clients(trained, tmp_path, says):
    bundle = tmp_path / "bundle"
    says("export", trained, bundle, "--describe", "words")
    found, own = read_experts(bundle), read_experts(trained)
    assert [e["words"] for e in found["experts"]] == [e["words"] for e in own["experts"]]
    assert "experts.json" in read_json(bundle / "fedweave.json")["files"], "with a checksum"
    text = everything(bundle)
    assert not [p for e in own["experts"] for p in e["typical"] if p in text] and "client_0" not in text
    card = (bundle / "README.md").read_text()
    assert "## Experts" in card and all(", ".join(e["words"][:2]) in card for e in own["experts"] if e["words"])
    assert says("describe", bundle, "--quiet").startswith(f"{len(own['experts'])} experts of round")


def test_examples_tell_all(trained, tmp_path, says, complains):
    bundle = tmp_path / "bundle"
    says("export", trained, bundle, "--describe", "examples")
    assert read_experts(bundle) == read_experts(trained)
    assert read_experts(trained)["experts"][0]["typical"][0].split(":")[0] in (bundle / "README.md").read_text()
    assert "what is written here has no router" in complains(
        "export", trained, tmp_path / "x", "--merge", 0, "--describe", "words"
    )


def test_a_description_of_another_round_or_none_is_refused(tiny_copy, tmp_path, complains):
    run = tiny_copy("training.lr=1e-2", "backbone.end_of_answer=false")
    write_experts(run, {**read_experts(run), "round": 99})
    assert "is of round 99" in complains("export", run, tmp_path / "bundle", "--describe", "words")
    (run / "experts.json").unlink()
    assert "fedweave describe" in complains("export", run, tmp_path / "bundle", "--describe", "words")


def test_somebody_s_words_stay_words_in_a_card():
    expert = {"name": "a|b", "share": 1.0, "words": ["<b>", "天气"], "typical": ["# head\n| x | [y](z)"]}
    lines = _experts({"schema": 1, "source": "1 prompt", "round": 1, "experts": [expert]})
    assert r"| expert 0, a\|b | 100% | \<b\>, 天气 |" in lines and r"- \# head \| x \| \[y\](z)" in lines
