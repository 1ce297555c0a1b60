"""A SuperLink and three sites as processes on loopback, with TLS and node keys; some are really killed."""

import shutil
import subprocess
from contextlib import contextmanager

import pytest
import torch

import fedweave
from fedweave.cli import main
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.runs.folder import RunFolder
from tests.federation.flower.processes import SITES, SMALL, Deployment
from tests.helpers import assert_trained_alike, events, read_json, wait_for, write_jsonl


@contextmanager
def running(folder, model_folder, *sites):
    """A SuperLink with these of the three registered sites."""
    made = Deployment(folder, model_folder("llama"))
    try:
        made.start(*sites)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, model_folder):
    with running(tmp_path_factory.mktemp("federation"), model_folder, *SITES) as made:
        yield made


def state(run):
    return RunFolder(run).newest().tensors


def assert_model_of_those_who_answered(deployment, run, monkeypatch):
    """In one process, with the same sites in every round, the same model comes out. Returns who they were, and the
    other run's folder."""
    answered = [set(event["bytes_up"]) for event in events(run, "round")]
    rounds, other = iter(answered), run.with_name(f"{run.name}-in-one-process")
    real = InProcessEngine.answers

    def answers(self, step, asked, question):
        if step.name == "train":
            chosen = next(rounds)
            asked = [one for one in asked if one.member.name in chosen]
        return real(self, step, asked, question)

    with monkeypatch.context() as patch:
        patch.setattr(InProcessEngine, "answers", answers)
        settings = [*SMALL, f"backbone.model={deployment.model}", f"training.rounds={len(answered)}"]
        own = ["data.source=jsonl", f"data.path={deployment.data}", f"output={other}"]
        own += ["federation.rule=clip", "federation.max_share=0.2"]  # which over sites are the defaults
        assert main(["run", "quickstart", *settings, *own, "--quiet"]) == 0
    ours, theirs = state(run), state(other)
    for name in ("theta", "phi"):
        assert torch.isfinite(ours[name]).all()
        assert_trained_alike(ours[name], theirs[name])
    return answered, other


@pytest.fixture(scope="module")
def federated(deployment):
    """A finished run of one round. Meanwhile a site with an unregistered key tries to join."""
    run = deployment.folder / "run"
    process = deployment.federate(
        "federate", "quickstart", *SMALL, "federation.sites=3", "training.rounds=1", f"output={run}",
        f"backbone.model={deployment.model}", f"federation.test={deployment.data / 'test.jsonl'}",
    )  # fmt: skip
    stranger = deployment.keys / "stranger"
    stranger.mkdir()
    (stranger / "ca.crt").write_bytes((deployment.keys / "north" / "ca.crt").read_bytes())
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(stranger / "site.key")]
    subprocess.run(command, check=True)
    deployment.describe("stranger", deployment.data / "north.jsonl")
    deployment.site("stranger")
    deployment.finish(process, "federate", 240)
    return run


def card_and_page(run):
    """(model card, report) of a run over sites, made as for any other run."""
    bundle = run.with_name(f"bundle-of-{len(events(run, 'round'))}-rounds")
    for words in (["export", run, bundle], ["report", run], ["budget", run], ["watch", run, "--once"]):
        assert main([str(word) for word in words]) == 0, words
    assert main(["generate", str(bundle), "How many?", "--max-new-tokens", "2"]) == 0
    return (bundle / "README.md").read_text(), (run / "report.html").read_text()


def test_a_deployment_gives_the_in_process_model(deployment, federated, monkeypatch):
    answered, other = assert_model_of_those_who_answered(deployment, federated, monkeypatch)
    assert answered == [set(SITES)]
    ours, theirs = (read_json(run / "summary.json") for run in (federated, other))
    assert ours["clients"] == 3 and ours["examples"] == theirs["examples"] and ours["rounds"] == 1
    assert ours["test"]["best"]["loss"]["soft"] == pytest.approx(theirs["test"]["best"]["loss"]["soft"], abs=1e-4)
    assert ours["validation"]["best_loss"] == pytest.approx(theirs["validation"]["best_loss"], abs=1e-4)
    assert set(events(federated, "validation")[0]["sites"]) == set(SITES)
    assert main(["generate", str(federated), "How many?", "--max-new-tokens", "2"]) == 0
    assert main(["evaluate", str(federated)]) == 0, "on federation.test"
    card, page = card_and_page(federated)
    assert "3 clients, each a site" in card and "| loss (sparse) |" in card and "| all |" in card
    assert 'id="figure-test-loss"' in page


def test_a_site_killed_in_a_round_is_missed_and_the_run_ends_well(deployment, federated, monkeypatch):
    """kill -9 between two questions: the round ends at its deadline without the site, the next does not wait."""
    shutil.rmtree(federated.with_name("run-in-one-process"), ignore_errors=True)
    more = ["training.rounds=3", "federation.deadline=30", "federation.test=null"]
    process = deployment.federate("killed", "--resume", federated, *more)
    wait_for(lambda: "resuming after round 1" in deployment.log("killed"), "the resumed run")
    deployment.kill("west")
    deployment.finish(process, "killed", 240)
    log, rounds = deployment.log("killed"), events(federated, "round")
    assert [event["round"] for event in rounds] == [1, 2, 3]
    assert "site west did not answer within 30 s" in log, log
    assert [len(event["participants"]) for event in rounds] == [3, 3, 2]
    assert set(events(federated, "validation")[-1]["sites"]) == {"north", "south"}
    answered, _ = assert_model_of_those_who_answered(deployment, federated, monkeypatch)
    assert answered == [set(SITES), {"north", "south"}, {"north", "south"}]


def test_a_run_without_a_test_set_shows_what_its_sites_measured(deployment, federated, capsys):
    """The run of the test before, whose server has no test set any more."""
    card, page = card_and_page(federated)
    chosen = read_json(federated / "summary.json")["validation"]["best_round"]
    best = next(event for event in events(federated, "validation") if event["round"] == chosen)
    for site, loss in {**best["sites"], "all sites": best["loss"]}.items():
        assert f"| {site} | {loss:.3f} |" in card
        assert f"<td>{site}</td><td>{loss:.3f}</td>" in page
    capsys.readouterr()
    refusals = {"diagnose": "a diagnosis needs them", "evaluate": "--data", "resume": "fedweave federate --resume"}
    for verb, word in refusals.items():
        assert main([verb, str(federated)]) == 2
        error = capsys.readouterr().err
        assert word in error and error.count("\n") == 1


def test_an_unregistered_site_is_turned_away(deployment, federated):
    assert deployment.processes["stranger"].wait(180) == 2
    assert "its key is not registered" in deployment.log("stranger")
    assert "stranger" not in deployment.log("federate")


# -------------------------------------------------------------------------------------- minutes each


def begin(made, rounds, *more):
    """A federation under way after its first round: (its process, its run folder)."""
    run = made.folder / "run"
    process = made.federate(
        "federate", "quickstart", *SMALL, f"training.rounds={rounds}", f"output={run}",
        f"backbone.model={made.model}", *(more or ["federation.sites=3", "federation.deadline=10"]),
    )  # fmt: skip
    wait_for(lambda: events(run, "round"), "round 1")
    return process, run


@pytest.mark.slow
def test_server_and_superlink_killed_and_resumed_give_the_whole_runs_model(tmp_path, model_folder, monkeypatch):
    """kill -9 of `fedweave federate`, then of the SuperLink, each in the middle of training."""
    with running(tmp_path, model_folder, *SITES) as made:
        patient = ["federation.min_answers=3", "federation.repeats=5", "federation.deadline=60"]
        _, run = begin(made, 4, "federation.sites=3", *patient)
        made.kill("federate")
        second = made.federate("second", "--resume", run)
        wait_for(lambda: len(events(run, "round")) >= 2, "round 2")
        made.kill("superlink")
        assert second.wait(120) == 2 and "--resume" in made.log("second"), made.log("second")
        made.superlink()
        made.finish(made.federate("third", "--resume", run), "third", 400)
        assert "resuming after round" in made.log("third")
        assert [event["round"] for event in events(run, "round")] == [1, 2, 3, 4]
        answered, _ = assert_model_of_those_who_answered(made, run, monkeypatch)
        assert answered == [set(SITES)] * 4


@pytest.mark.slow
def test_a_killed_site_comes_back_and_then_leaves_for_good(tmp_path, model_folder, monkeypatch):
    with running(tmp_path, model_folder, *SITES) as made:
        process, run = begin(made, 14)
        made.kill("west")
        wait_for(lambda: "site west" in made.log("federate"), "the missed answer")
        made.site("west")
        wait_for(lambda: "west" not in answering(run), "a round without it")
        wait_for(lambda: "west" in answering(run), "its return")
        made.kill("west")
        made.finish(process, "federate", 600)
        assert "site west is here" in made.log("federate")
        answered, _ = assert_model_of_those_who_answered(made, run, monkeypatch)
        assert answered[-1] == {"north", "south"}


def answering(run):
    """The sites whose answers the last round has."""
    return set(events(run, "round")[-1]["bytes_up"])


@pytest.mark.slow
def test_an_answer_that_comes_too_late_does_not_count(tmp_path, model_folder, monkeypatch):
    """A site's machine sleeps in a round and wakes after the deadline: what it sends then is of a past round."""
    with running(tmp_path, model_folder, *SITES) as made:
        process, run = begin(made, 10)
        made.pause("west")
        wait_for(lambda: "west" not in answering(run), "a round without it")
        made.wake("west")
        wait_for(lambda: "west" in answering(run), "its return")
        made.finish(process, "federate", 600)
        assert "site west did not answer within 10 s" in made.log("federate")
        assert_model_of_those_who_answered(made, run, monkeypatch)


@pytest.mark.slow
def test_a_site_that_answers_twice_counts_once(tmp_path, model_folder, monkeypatch):
    with running(tmp_path, model_folder, "north", "south") as made:
        made.stammering_site("west")
        process, run = begin(made, 3)
        made.finish(process, "federate", 400)
        answered, _ = assert_model_of_those_who_answered(made, run, monkeypatch)
        assert answered == [set(SITES)] * 3, made.log("west")


@pytest.mark.slow
def test_a_late_site_joins_a_running_federation_and_a_second_one_of_its_name_does_not(tmp_path, model_folder):
    with running(tmp_path, model_folder, "north", "south") as made:
        late = ["federation.sites=2", "federation.join_distance=2.0", "federation.deadline=60"]
        process, run = begin(made, 8, *late)
        made.site("west")
        made.finish(process, "federate", 400)
        assert "site west joins with" in made.log("federate")
        assert "west" in answering(run)
        made.describe("west", made.data / "west.jsonl", name="north")  # west poses as north
        made.leave("west")
        made.site("west")
        more = made.federate("more", "--resume", run, "training.rounds=10")
        made.finish(more, "more", 400)
        assert "site north is turned away: its node is registered as west" in made.log("more")


@pytest.mark.slow
def test_a_site_brings_a_new_kind_in_mid_run_and_the_finished_model_has_an_expert_for_it(tmp_path, model_folder):
    """The site's file grows while the federation runs; the site is even killed and started again."""
    living = ["living.notice=open", "living.least=6", "alignment.max_experts=8", "discovery.warmup_steps=6",
              "discovery.warmup_lr=1e-2", "federation.sites=3", "federation.deadline=60",
              "router.warm_start.enabled=true", "router.warm_start.rounds=3", "router.warm_start.steps=30",
              "router.warm_start.lr=1e-2"]  # fmt: skip
    kinds = {"Add {} and {}.": "blue blue blue", "Name letter {} of {}.": "north wind", "Turn {} by {}.": "seventy"}
    rows = [
        [{"prompt": ask.format(i, 2 * i), "response": answer} for i in range(60)] for ask, answer in kinds.items()
    ]
    with running(tmp_path, model_folder) as made:
        files = {site: made.data / f"{site}.jsonl" for site in SITES}
        for i, site in enumerate(SITES):
            write_jsonl(files[site], [*rows[0][i::3], *rows[1][i::3]])
            made.site(site)
        process, run = begin(made, 10, *living)
        write_jsonl(files["north"], [*rows[0][::3], *rows[1][::3], *rows[2]])
        wait_for(lambda: any(event["opened"] for event in events(run, "change")), "an expert that opens")
        made.kill("north")
        made.site("north")
        made.finish(process, "federate", 600)
        (change,) = [event for event in events(run, "change") if event["came"]]  # others: it is away, and back
        assert set(change["came"]) == {"north"} and "new rows at north" in made.log("federate")
        assert "north" in answering(run) and "its data has changed" not in made.log("federate")
        assert read_json(run / "summary.json")["experts"] == change["experts"]
        assert "The life of the experts" in card_and_page(run)[1]
        model, asked = fedweave.load(run), [[row["prompt"] for row in own[1::3]] for own in rows]
        new, chosen = torch.tensor(change["opened"]), [model.route(prompts).argmax(1) for prompts in asked]
        shares = [float(torch.isin(experts, new).float().mean()) for experts in chosen]
        assert shares[2] > 0.5 > 0.1 > max(shares[:2]), "the finished model answers the new kind by its expert"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_sites_work_through_the_proxy_and_nobody_registers_through_it(tmp_path, model_folder, monkeypatch):
    with running(tmp_path, model_folder) as made:
        port = made.proxy()
        for name in SITES:
            made.describe(name, made.data / f"{name}.jsonl", port=port)
            made.site(name)
        process, run = begin(made, 2)
        made.finish(process, "federate", 240)
        answered, _ = assert_model_of_those_who_answered(made, run, monkeypatch)
        assert answered == [set(SITES)] * 2
        with pytest.raises(subprocess.CalledProcessError) as refused:
            made.register("north", port=port)
        assert "403" in str(refused.value.stdout) + str(refused.value.stderr)


@pytest.mark.slow
def test_sites_add_up_masked_updates_and_one_that_is_killed_is_missed(tmp_path, model_folder, monkeypatch):
    """Four sites with secure aggregation and real keys, of which one is killed in a round."""
    sites = ("north", "south", "west", "east")
    made = Deployment(tmp_path, model_folder("llama"), sites)
    run = tmp_path / "run"
    try:
        made.start(*sites)
        process = made.federate(
            "federate",
            "quickstart",
            *SMALL,
            "federation.sites=4",
            "training.rounds=4",
            f"output={run}",
            f"backbone.model={made.model}",
            "federation.secure_aggregation=true",
            "federation.min_answers=3",
            "federation.deadline=20",
            "router.warm_start.rounds=1",
            "evaluation.every=4",
        )  # fmt: skip - every sum takes four questions, and a question over Flower a few seconds
        wait_for(lambda: (run / "metrics.jsonl").is_file() and events(run, "round"), "a first round")
        made.kill("east")
        assert process.wait(600) == 0, made.log("federate")
    finally:
        made.stop()
    sent = [event["bytes_up"] for event in events(run, "round")]
    masked = [{name for name, size in each.items() if size > 10_000} for each in sent]  # keys and shares are small
    assert len(masked) == 4 and masked[0] == set(sites) and masked[-1] == set(sites) - {"east"}
    assert all(event["sites"].keys() == {"all sites"} for event in events(run, "validation"))
    with monkeypatch.context() as patch:
        rounds, real = iter(masked), InProcessEngine.answers

        def answers(self, step, asked, question):
            chosen = next(rounds) if step.name == "train" else {one.member.name for one in asked}
            return real(self, step, [one for one in asked if one.member.name in chosen], question)

        patch.setattr(InProcessEngine, "answers", answers)
        other = tmp_path / "in-one-process"
        own = ["data.source=jsonl", f"data.path={made.data}", f"output={other}", "federation.rule=mean"]
        settings = [*SMALL, f"backbone.model={made.model}", "training.rounds=4", "router.warm_start.rounds=1"]
        assert main(["run", "quickstart", *settings, *own, "--quiet"]) == 0
    for name in ("theta", "phi"):
        assert_trained_alike(state(run)[name], state(other)[name])
