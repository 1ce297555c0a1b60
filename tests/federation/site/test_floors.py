"""What no server can get a site to do, and what of its troubles a server hears."""

import dataclasses

import pytest

from fedweave.config import dump_config
from fedweave.errors import UserError
from fedweave.federation.message import Message
from fedweave.federation.site.floors import check_buckets, check_question
from fedweave.federation.site.settings import Floors, SiteConfig
from fedweave.federation.site.site import Models, OwnFiles, Site
from fedweave.methods import build_method
from tests.federations import changed


def question(config, step: str = "train", t: int = 0) -> Message:
    return Message(facts={"step": step, "t": t, "config": dump_config(config), "index": 0, "federation": "f",
                          "sizes": [], "assignment": []})  # fmt: skip


@pytest.mark.parametrize(
    ("floors", "settings", "step", "words"),
    [
        (Floors(batch=4), {"training": {"batch_size": 3}}, "train", "asks for 3, where this site's floors.batch"),
        (Floors(batch=4), {"discovery": {"warmup_batch": 1}}, "discover", "floors.batch is 4"),
        (Floors(steps=5), {"training": {"local_steps": 1}}, "train", "floors.steps is 5"),
        (Floors(clip=0.1), {"training": {"clip": 1e-9}}, "train", "asks for 1e-09, where this site's floors.clip"),
        (Floors(questions=("hello", "train")), {}, "moments", "does not answer 'moments'"),
        (Floors(rounds=1), {}, "train", "1 rounds at most"),
        (Floors(secure=True), {}, "train", "no secure aggregation, which this site's floors.secure asks for"),
        (Floors(level="example"), {}, "discover", "privacy.level is none, this site's floors.level example"),
    ],
)  # fmt: skip
def test_a_question_below_a_floor_is_refused(floors, settings, step, words, config):
    with pytest.raises(UserError) as refusal:
        check_question(floors, changed(config, **settings), question(config, step, t=1))
    assert words in str(refusal.value)
    check_question(Floors(batch=1, clip=0.0), changed(config, **settings), question(config, step))


def test_a_bucket_below_the_floor_is_not_signed():
    check_buckets(Floors(bucket=3), [3, 9])
    with pytest.raises(UserError, match=r"smaller than this site's floors\.bucket=4"):
        check_buckets(Floors(bucket=4), [3, 9])


@pytest.fixture
def site(tmp_path, model_folder, console):
    """A real site whose first row is a secret that no encoder can use."""

    def make(row: str = '{"prompt": {"patient": "Smith"}, "response": "x"}', floors: Floors | None = None) -> Site:
        (tmp_path / "rows.jsonl").write_text(row + "\n")
        settings = SiteConfig(
            name="clinic",
            data=str(tmp_path / "rows.jsonl"),
            state=str(tmp_path / "state"),
            floors=floors or Floors(),
        )
        own = dataclasses.replace(settings.backbone, model=str(model_folder("llama")))
        return Site(OwnFiles(dataclasses.replace(settings, backbone=own)), Models(), build_method, console)

    return make


@pytest.fixture
def console():
    from fedweave.console import Console

    console = Console(quiet=True)
    console.said = []
    console.warn = console.said.append
    return console


def test_an_error_that_travels_says_nothing_of_the_site(site, config, console):
    told = site().answer(question(config, "discover")).facts["error"]
    assert told == "UserError; the site's own log says more"
    assert "Smith" in console.said[0] and "rows.jsonl:1" in console.said[0], "its own log says everything"


def test_a_site_with_another_model_in_mind_answers_nothing(site, config):
    wary = site(floors=Floors(fingerprint="another"))
    for step in ("hello", "discover"):
        told = wary.answer(question(config, step)).facts["error"]
        assert "Smith" not in told
    assert "not the one of this site's floors.fingerprint" in wary.answer(question(config, "hello")).facts["error"]
