"""Costs: the paper's own figures to the digit, from configurations alone, and counts that real runs confirm."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedweave.analysis.budget import predict
from fedweave.analysis.shapes import model_shape
from fedweave.analysis.spent import run_costs
from fedweave.config import load_config
from fedweave.errors import UserError
from fedweave.federation.message import Message
from fedweave.methods import METHODS, build_method
from fedweave.methods.familiar import AskMoments
from fedweave.runs.reading import read_run
from fedweave.runs.summary import trained_parameters
from fedweave.training.memory import Step
from tests.federations import make_engine, with_method
from tests.helpers import read_json, read_jsonl, write_jsonl

PAPER = load_config("paper")
TABLE_5 = {  # millions: FedIT, FFA-LoRA, FedSA-LoRA, FedLEASE, FedWeave
    "meta-llama/Llama-3.2-3B": (9.18, 3.67, 9.18, 15.48, 10.75),
    "google/gemma-2-2b": (6.39, 2.56, 6.39, 11.12, 7.57),
}


@pytest.fixture(scope="module")
def llama():
    return model_shape("meta-llama/Llama-3.2-3B")


@pytest.mark.parametrize("model", TABLE_5)
def test_table_5_to_the_digit(model):
    budget = predict(model_shape(model), PAPER)
    names = ("fedit", "ffa-lora", "fedsa-lora", "fedlease", "fedweave")
    assert tuple(round(budget.methods[n].trainable / 1e6, 2) for n in names) == TABLE_5[model]
    assert [budget.methods[n].rank for n in names] == [32, 32, 32, 8, 8]
    assert [budget.methods[n].routers for n in names] == [0, 0, 0, 4, 1]


def test_appendix_b_to_the_digit(llama):
    budget = predict(llama, PAPER)
    once = budget.discovery
    assert once.signature_numbers == 917_504 and f"{once.signature_bytes / 2**20:.2f}" == "3.50"
    assert once.client_bytes == 4 * once.signature_bytes
    assert (once.warmup_steps, once.training_steps, once.warmup_ratio) == (40, 200, 0.2)  # C_i / 20
    assert predict(llama, PAPER, buckets=7).discovery.warmup_ratio == 7 / 20
    assert llama.parameters == 3_212_749_824  # what the hub says of the real checkpoint


def test_what_a_client_sends_and_receives(llama):
    budget = predict(llama, PAPER, served=2, precision="bfloat16")
    fedweave, router = budget.methods["fedweave"], 1_575_428
    assert fedweave.down == fedweave.trainable == 9_175_040 + router
    assert fedweave.up == 9_175_040 // 2 + router  # inactive experts are omitted
    assert budget.round_bytes("fedweave") == (2 * fedweave.up, 4 * fedweave.down)  # broadcasts are float32
    # 28 layers of rank 32: B is out q 3072 + out v 1024, A twice the width
    assert budget.methods["ffa-lora"].up == 28 * 32 * 4096
    assert budget.methods["fedsa-lora"].up == 28 * 32 * 6144
    assert budget.methods["fedlease"].up == 9_175_040 // 4 + router
    assert budget.methods["local-only"].up == budget.methods["local-only"].down == 0


def test_every_method_trains_what_its_budget_says(config, backbone, model_folder):
    shape = model_shape(str(model_folder("llama")))
    for name in METHODS:
        if name == "oracle":  # needs its labels revealed
            continue
        chosen = with_method(config, name)
        engine, method = make_engine(chosen, backbone), build_method(chosen)
        state = method.prepare(engine)
        engine.detach()
        payload = predict(shape, chosen, experts=state.layout.experts).methods[name]
        trained = torch.zeros(state.layout.size, dtype=torch.bool)
        routers = 0
        for lane in (method.lane(client, state, t) for client in engine.members for t in range(2)):
            trained |= lane.trainable if lane.trainable is not None else torch.ones_like(trained)
            routers = state.forgetting().phi.numel() if lane.phi is not None else 0
        assert payload.trainable == int(trained.sum()) + routers, name
        assert payload.trainable == trained_parameters(chosen, state), name


def test_sums_of_features_are_counted_as_they_are_sent(config, backbone, model_folder):
    engine = make_engine(config, backbone)
    build_method(config).prepare(engine)
    client = max(engine.members, key=len)
    (answer,) = AskMoments(config).answer(engine.compute, [client], Message())
    engine.detach()
    sent = sum(part.nbytes for part in answer.parts.values())
    assert sent == predict(model_shape(str(model_folder("llama"))), config).discovery.familiar_bytes > 0
    assert predict(model_shape("meta-llama/Llama-3.2-3B"), PAPER).discovery.familiar_bytes == 0


def test_a_new_method_brings_its_own_costs(llama, monkeypatch):
    monkeypatch.setitem(METHODS, "mine", METHODS["fedweave"])
    mine = predict(llama, load_config("paper", ["method=mine"]), served=1).methods["mine"]
    assert mine.down == mine.trainable == 9_175_040 + 1_575_428
    assert mine.up == 9_175_040 // 4 + 1_575_428


def test_a_sketch_counts_what_it_sends(llama):
    once = predict(llama, load_config("paper", ["discovery.sketch=64"])).discovery
    assert once.signature_numbers == 56 * 64 and once.signature_bytes == 2 * 56 * 64  # half precision


MEASURED = json.loads(Path("benchmarks/results/h200.json").read_text())["shapes"]
NAMED = {"135m": "HuggingFaceTB/SmolLM2-135M-Instruct", "3b": "meta-llama/Llama-3.2-3B"}


def peak_gib(name: str, settings: list[str], tokens: float) -> float:
    found = predict(model_shape(NAMED[name]), load_config("paper", settings), tokens=tokens)
    return sum(found.memory.kept.values()) / 2**30


@pytest.mark.parametrize("name", NAMED)
def test_memory_is_what_was_measured_on_a_gpu(name):
    """The published figures of a round with 20 clients, 8 examples a step, four experts of rank 8."""
    measured = MEASURED[name]
    found = peak_gib(name, ["data.clients=20"], measured["tokens"] / 1600)
    fused = next(rung for rung in measured["rungs"] if rung["name"].startswith("+ fused"))
    assert found == pytest.approx(fused["peak_gib"], rel=0.05)


def test_memory_follows_clients_and_batches():
    """The sweep of the smallest model: from 5 clients to 40, from 4 examples a step to 32."""
    for point in MEASURED["135m"]["sweep"]:
        settings = [f"data.clients={point['clients']}", f"training.batch_size={point['batch']}"]
        found = peak_gib("135m", settings, point["tokens"] / (10 * point["clients"] * point["batch"]))
        assert found == pytest.approx(point["peak_gib"], rel=0.05), point["name"]


def test_what_transformers_runs_keeps_more(llama):
    layout = llama.layout(("q_proj", "v_proj"), 8, 4)
    packed = next(rung for rung in MEASURED["3b"]["rungs"] if rung["name"] == "+ packed")
    step = Step(20, MEASURED["3b"]["tokens"] / 10, layout.size + 1_575_428)
    memory = replace(llama.memory(layout, 2), fused=False).training(step)
    assert (2 * llama.parameters + sum(memory.values())) / 2**30 == pytest.approx(packed["peak_gib"], rel=0.05)


def test_the_backbone_is_counted_as_it_is_kept(says):
    def weights(*settings: str) -> float:
        (found,) = json.loads(says("budget", "meta-llama/Llama-3.2-3B", *settings, "--json"))
        return found["memory"]["kept"]["backbone"]

    plain, linear, unpacked = weights(), 28 * 3072 * (3072 * 2 + 1024 * 2 + 8192 * 3), 2 * 3072 * 8192
    assert plain == 2 * 3_212_749_824
    assert weights("training.fp8=forward") == plain + linear and weights("training.fp8=both") == plain + 2 * linear
    four = weights("weights=nf4") - 2 * unpacked  # the largest product, written out in half precision
    assert 0.25 < (four - (plain - 2 * linear)) / (2 * linear) < 0.3


def test_cards_hold_more_clients_where_layers_run_twice(says):
    (found,) = json.loads(says("budget", "meta-llama/Llama-3.2-3B", "clients=20", "--json"))
    cards = {card["gib"]: card for card in found["memory"]["cards"]}
    assert cards[8]["kept"] == 0 and cards[8]["again"] >= 1 and cards[8]["chosen"] == "again"
    assert 1 <= cards[16]["kept"] < cards[16]["again"] and cards[80]["kept"] == 20
    assert cards[16]["chosen"] == "kept", "at 3B smaller groups cost less than layers that run twice"
    shown = says("budget", "meta-llama/Llama-3.2-3B", "dtype=float32", "target_modules=all-linear")
    assert "at the peak" in shown and "80 GiB" in shown


def test_memory_is_what_a_process_takes(small, tmp_path):
    """A run in a process of its own: what the system counted, with all of Python, beside the prediction."""
    command = "import sys; from fedweave.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["run", "quickstart", *small, f"output={tmp_path / 'run'}", "--quiet"]
    subprocess.run([sys.executable, "-c", command, *argv], check=True, timeout=600)
    memory = next(row for row in run_costs(read_run(tmp_path / "run")).spent if row.what == "peak memory")
    assert memory.measured == pytest.approx(memory.predicted, rel=0.25)  # libraries differ from machine to machine


def test_an_unknown_precision_or_module_is_one_sentence(llama):
    with pytest.raises(UserError, match="did you mean 'float32'"):
        predict(llama, PAPER, precision="flaot32")
    with pytest.raises(UserError, match="'query' matches no layer of meta-llama"):
        predict(llama, load_config("paper", ["experts.target_modules=query"]))


# -------------------------------------------------------------------------------------- the verb


def test_the_verb_prints_table_5_for_both_backbones(says):
    shown = says("budget", *TABLE_5)
    for i, name in enumerate(("fedit", "ffa-lora", "fedsa-lora", "fedlease", "fedweave")):
        # later tables repeat a method's name; the first has one column of millions for each model
        first = next(line.split() for line in shown.splitlines() if line.split()[:1] == [name])
        assert first[-2:] == [f"{TABLE_5[m][i]:.2f}" for m in TABLE_5]
    assert "3.50 MiB a bucket" in shown and "20.0%" in shown


def test_settings_change_the_budget(says, model_folder):
    settings = ["experts=1", "precision=int8", "buckets=2", "rank=4"]
    one = json.loads(says("budget", "paper", *settings, "--json"))[0]
    assert one["methods"]["fedweave"]["experts"] == 1 and one["methods"]["fedweave"]["rank"] == 4
    assert one["methods"]["fedit"]["up_bytes"] == 9_175_040 + 9_175_040 // 256 * 4  # with a scale for every 256
    assert one["discovery"]["warmup_ratio"] == 0.1
    tiny = json.loads(says("budget", model_folder("gemma2"), "--json"))[0]
    # 2 layers, rank 32: in 32 and 32, out 4·8 and 2·8
    assert tiny["methods"]["fedit"]["trainable"] == 2 * 32 * (32 + 32 + 32 + 16)


def test_a_sketch_makes_signatures_small(says):
    whole, sketched = (
        json.loads(says("budget", "paper", f"discovery.sketch={k}", "--json"))[0]["discovery"] for k in (0, 64)
    )
    assert whole["signature_bytes"] == 4 * whole["signature_numbers"] == 4 * 28 * 8 * (3072 + 1024)
    assert sketched["signature_numbers"] == 2 * 28 * 64 and sketched["signature_bytes"] == 2 * 2 * 28 * 64
    assert sketched["adapter_bytes"] == whole["adapter_bytes"]


def test_a_runs_costs_stand_beside_their_prediction(tiny_run, says):
    folder = tiny_run()
    assert "peak memory" in says("budget", folder)
    rows = {row["what"]: row for row in json.loads(says("budget", folder, "--json"))[1:]}
    summary = read_json(folder / "summary.json")
    trained = rows["trained parameters"]
    assert trained["predicted"] == trained["measured"] == summary["trained_parameters"] > 0
    tokens = rows["tokens trained on"]
    assert 0.4 < tokens["measured"] / tokens["predicted"] <= 1.2  # small buckets give smaller batches
    assert rows["peak memory"]["measured"] > 0 and rows["peak memory"]["predicted"] > 0
    assert rows["total time"]["measured"] == summary["timing"]["total_s"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["paper", "experts=0"], "experts must be a number of at least 1"),
        (["paper", "experts=2.5"], "experts must be a whole number"),
        (["paper", "served=9"], "served cannot exceed experts"),
        (["paper", "precison=int8"], "unknown config key 'precison': did you mean 'precision'?"),
        (["paper", "rnk=3"], "unknown config key 'rnk': did you mean 'rank'?"),
        (["paper", "warmup_steps=3"], "unknown config key 'warmup_steps': did you mean 'discovery.warmup_steps'?"),
        (["./nowhere"], "./nowhere is no run, recipe, model folder or .gguf file"),
        (["gone.gguf"], "there is no such GGUF file"),
    ],
)
def test_mistakes_are_one_sentence(argv, message, complains):
    assert message in complains("budget", *argv)


def test_counted_bytes_stand_beside_their_prediction(tiny_copy):
    """An engine that counts what it sends logs bytes_up per client and bytes_down per participant."""
    folder = tiny_copy()
    events = read_jsonl(folder / "metrics.jsonl")
    for event in events:
        if event["event"] == "round":
            event |= {"bytes_up": {"client_0": 7, "client_1": 5}, "bytes_down": 10}
    write_jsonl(folder / "metrics.jsonl", events)
    rows = {row.what: row for row in run_costs(read_run(folder)).spent}
    assert rows["sent by clients"].measured == 3 * 12 and rows["sent to clients"].measured == 3 * 3 * 10
    # three clients receive everything in three rounds; they send only the experts that they serve
    budget = run_costs(read_run(folder)).budget
    assert rows["sent to clients"].predicted == 9 * budget.round_bytes("fedweave")[1]
    assert 0 < rows["sent by clients"].predicted <= 9 * budget.round_bytes("fedweave")[0]


def test_a_run_takes_no_other_settings(tiny_run, complains):
    assert "stands alone" in complains("budget", tiny_run(), "experts=3")


def test_what_cannot_be_a_models_name_is_told_at_once(monkeypatch):
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("the hub was asked")
    )
    for name in ("quickstrt", "/no/where", "a/b/c"):
        with pytest.raises(UserError, match="no hub id of the form owner/name"):
            model_shape(name)
