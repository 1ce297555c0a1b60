"""Prompts like none before: no expert answers, and everyone can see it."""

import httpx
import pytest

from fedweave.cli import main
from fedweave.errors import UserError
from fedweave.inference.generate import generate
from fedweave.runs.use import export_run, load
from tests.helpers import PROMPTS, SMALL
from tests.serving.conftest import ask, running

ODD = "§§ 9 %% ## qzx ~~ {[(|)]} vvv 000 ^^ jjk;;; //// @@@"
SHARED = ["experts.shared_rank=8", "router.training=chosen", "experts.labels=router"]


@pytest.fixture(scope="module", params=["base", "shared"])
def careful(request, tmp_path_factory, model_folder):
    """(what answers strange prompts, a bundle that finds this test's prompts strange, its run)"""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    more = [
        f"backbone.model={model_folder('llama')}",
        *SMALL,
        "router.familiar=0.9",
        "router.doubt=1",
        "training.lr=1e-2",
    ]
    assert main(["run", "quickstart", *more, *(SHARED if request.param == "shared" else []),
                 f"output={folder}", "--quiet"]) == 0  # fmt: skip
    export_run(folder, folder.parent / "bundle")
    return request.param, folder.parent / "bundle", folder


def test_what_is_strange_falls_back_and_says_so(careful):
    fallback, bundle, _ = careful
    card = (bundle / "README.md").read_text()
    assert "one like none before is answered by" in card and "sums of prompt features" in card
    twin = load(bundle, device="cpu")
    (odd,) = twin.generate([ODD], max_new_tokens=8)
    assert odd.doubt > 1 and (odd.expert, odd.adapter) == (-1, fallback) and not any(odd.weights)
    known = [a for a in twin.generate(PROMPTS, max_new_tokens=2) if a.doubt <= 1]
    assert known and all(a.expert >= 0 and sum(a.weights) == pytest.approx(1) for a in known)
    bare = generate(twin.backbone, twin.backbone.prompts.encode_prompts([ODD]), 8)[0].rstrip("\ufffd").strip()
    with running(load(bundle, device="cpu")) as server:
        client = server.client()
        names = [m.id for m in client.models.list()]
        assert names[-1] == "base" and ("shared" in names) == (fallback == "shared")
        reply = client.chat.completions.create(**ask(ODD, max_tokens=8))
        assert reply.choices[0].message.content == odd.text
        assert reply.fedweave["adapter"] == fallback and reply.fedweave["doubt"] == pytest.approx(
            odd.doubt, rel=1e-3
        )
        base = client.chat.completions.create(**{**ask(ODD, max_tokens=8), "model": "base"})
        assert base.choices[0].message.content == bare
        assert (base.fedweave["expert"], base.fedweave["adapter"]) == (-1, "base")
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "fedweave_unfamiliar_total 1.0" in metrics and 'fedweave_answers_total{expert="base"}' in metrics
        with running(twin, upstream=server.url) as gateway:  # the same by way of a gateway
            assert not httpx.get(f"{gateway.url}/health").json().get("reason")
            again = gateway.client().chat.completions.create(**ask(ODD, max_tokens=8))
            assert again.choices[0].message.content == odd.text and again.fedweave["adapter"] == fallback


def test_the_limit_may_be_chosen_at_export_and_in_use(careful, tmp_path, tiny_run):
    _, bundle, run = careful
    export_run(run, tmp_path / "bold", doubt=1e6)
    for model in (load(bundle, doubt=1e6), load(tmp_path / "bold")):
        (odd,) = model.generate([ODD], max_new_tokens=2)
        assert odd.expert >= 0 and 0 < odd.doubt < 1
    with pytest.raises(UserError, match="above 0"):
        load(bundle, doubt=-1.0)
    with pytest.raises(UserError, match=r"learns a limit unless router\.familiar=1"):
        load(tiny_run("router.familiar=1"), doubt=2.0)
