"""K clients in lockstep learn what each learns alone, and what a plain PyTorch loop over PEFT learns."""

import copy
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout
from fedweave.training import graphs
from fedweave.training.batch import Capacity, ClientData, Lane, build_batch
from fedweave.training.graphs import GraphedSteps, levels
from fedweave.training.lockstep import LaneGroup, Trainable, clip_lanes, clipping
from fedweave.training.schedule import local_schedule
from tests.helpers import TARGETS, make_lanes, make_trainer

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


def setup(backbone, experts=3, routed=True, targets=TARGETS):
    layout = AdapterLayout.of(backbone.linear_layers(targets), 4, experts)
    return layout, RouterLayout(backbone.width, 16, experts) if routed else None


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_lockstep_equals_one_by_one(backbone_of, family, dropout):
    backbone = backbone_of(family)
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=4)
    trainer, mixture = make_trainer(backbone, layout, router, dropout)
    alone = list(trainer.train(lanes, lanes_per_step=1))
    for together in (4, 3):
        for one, many in zip(alone, trainer.train(lanes, lanes_per_step=together), strict=True):
            assert (one.delta_theta - many.delta_theta).abs().max() <= 1e-5
            assert (one.delta_phi - many.delta_phi).abs().max() <= 1e-5
            assert one.losses == pytest.approx(many.losses, abs=1e-5)
            assert one.tokens == many.tokens
    mixture.detach()
    assert alone[0].delta_theta.abs().max() > 1e-2, "nothing was learned, so nothing was tested"


def test_lanes_with_fewer_steps_end_where_they_would_alone(backbone):
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=4, steps=4)
    for lane, steps in zip(lanes, (2, 4, 1, 4), strict=True):
        lane.schedule = lane.schedule[:steps]
    trainer, mixture = make_trainer(backbone, layout, router, 0.1)
    advanced: list[int] = []
    alone = list(trainer.train(lanes, 1))
    together = list(trainer.train(lanes, 4, advanced.append))
    mixture.detach()
    assert advanced == [4, 3, 2, 2]
    for one, many in zip(alone, together, strict=True):
        assert (one.delta_theta - many.delta_theta).abs().max() <= 1e-5
        assert (one.delta_phi - many.delta_phi).abs().max() <= 1e-5
        assert one.losses == pytest.approx(many.losses, abs=1e-5) and one.tokens == many.tokens


def test_a_client_does_not_feel_its_neighbours(backbone):
    """Another client's huge gradients, other data and other start must not touch loss, clipping or moments."""
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=3)
    trainer, mixture = make_trainer(backbone, layout, router)
    calm = list(trainer.train(lanes, 3))
    lanes[1].theta = lanes[1].theta * 30
    lanes[1].schedule = [step[:1] for step in lanes[1].schedule]
    wild = list(trainer.train(lanes, 3))
    mixture.detach()
    for k in (0, 2):
        assert (calm[k].delta_theta - wild[k].delta_theta).abs().max() <= 1e-5
        assert (calm[k].delta_phi - wild[k].delta_phi).abs().max() <= 1e-5
    assert (calm[1].delta_theta - wild[1].delta_theta).abs().max() > 1e-3


def test_numbers_that_are_none_stay_with_their_lane(backbone):
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=3)
    lanes[1].theta = torch.full_like(lanes[1].theta, math.nan)
    trainer, mixture = make_trainer(backbone, layout, router, 0.0)
    results = list(trainer.train(lanes, 3))
    mixture.detach()
    assert [bool(np.isfinite(result.losses).all()) for result in results] == [True, False, True]
    assert [bool(result.delta_theta.isfinite().all()) for result in results] == [True, False, True]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_what_is_frozen_never_moves(backbone, weight_decay):
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=2)
    for lane in lanes:
        lane.trainable = layout.is_b
    trainer, mixture = make_trainer(backbone, layout, router, weight_decay=weight_decay)
    results = list(trainer.train(lanes, 2))
    mixture.detach()
    for result in results:
        assert not result.delta_theta[~layout.is_b].any() and result.delta_theta[layout.is_b].any()
        assert result.delta_phi.any()


def test_clipping_is_per_lane_and_joint_over_experts_and_router():
    experts = torch.tensor([[3.0, 0.0], [0.03, 0.0]])
    router = torch.tensor([[4.0], [0.04]])
    norm = clip_lanes([experts, router], limit=1.0)
    assert norm.tolist() == pytest.approx([5.0, 0.05])
    assert experts.tolist()[0] == pytest.approx([0.6, 0.0], rel=1e-5) and router[0].item() == pytest.approx(0.8)
    assert experts[1, 0].item() == pytest.approx(0.03) and router[1, 0].item() == pytest.approx(0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_masked_clipped_and_widened_in_one_pass(dtype):
    """In half precision they are read as they lie; what does not train has no part in a lane's norm."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rows = Trainable((2, 3), torch.device("cpu"), dtype, lambda x: [{"A": x}], mask)
    rows.copy_grad.copy_(torch.tensor([[3.0, 4.0, 100.0], [0.5, 0.0, 0.0]]))
    norm, factor = clipping([rows.masked()], limit=1.0)
    assert norm.dtype == torch.float32 and norm.tolist() == pytest.approx([5.0, 0.5])
    found = rows.collect(factor)
    assert found is rows.master.grad and found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8, 0.0], [0.5, 0.0, 0.0]]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "targets", "weight_decay"),
    [
        ("llama", TARGETS, 0.0),
        ("llama", TARGETS, 0.1),
        *((family, ("all-linear",), 0.0) for family in ("llama", "qwen3", "phi3", "gemma2")),
    ],
)
def test_one_expert_training_equals_a_peft_loop(backbone_of, family, targets, weight_decay):
    """Four steps of LoRA with AdamW and clipping, written the ordinary way with PEFT and padded batches."""
    from peft import LoraConfig, get_peft_model

    backbone = backbone_of(family)
    layout, _ = setup(backbone, experts=1, routed=False, targets=targets)
    lane = make_lanes(backbone, layout, None, clients=1)[0]
    trainer, mixture = make_trainer(backbone, layout, None, targets=targets, clip=0.5, weight_decay=weight_decay)
    result = next(trainer.train([lane], 1))
    mixture.detach()

    theirs = "all-linear" if targets == ("all-linear",) else list(targets)
    with backbone.decoding():
        peft = get_peft_model(
            copy.deepcopy(backbone.model),
            LoraConfig(r=4, lora_alpha=16, target_modules=theirs, lora_dropout=0.0, task_type="CAUSAL_LM"),
        )
    parameters = dict(peft.named_parameters())
    for name, tensor in layout.named(lane.theta, 0).items():
        parameters[name.replace(".weight", ".default.weight")].data.copy_(tensor)
    trained = [p for p in peft.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2, weight_decay=weight_decay)
    for step, batch in enumerate(lane.schedule):
        rows = [lane.data.examples[i] for i in batch]
        length = max(len(r.ids) for r in rows)
        ids, mask = torch.zeros(2, len(rows), length, dtype=torch.long)
        labels = torch.full((len(rows), length), -100)
        for k, r in enumerate(rows):
            ids[k, : len(r.ids)] = torch.from_numpy(r.ids)
            mask[k, : len(r.ids)] = 1
            labels[k, r.answer_start : len(r.ids)] = ids[k, r.answer_start : len(r.ids)]
        logits = peft(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        assert loss.item() == pytest.approx(result.losses[step], abs=1e-5)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimiser.step()
    final = layout.named(lane.theta + result.delta_theta, 0)
    for name, tensor in final.items():
        theirs = parameters[name.replace(".weight", ".default.weight")]
        assert (tensor - theirs).abs().max() <= 1e-5


def test_router_gradient_is_that_of_the_soft_mixture(backbone):
    """One step with a tiny rate moves the router against a finite-difference gradient of the loss."""
    layout, router = setup(backbone)
    lane = make_lanes(backbone, layout, router, clients=1, steps=1)[0]
    trainer, mixture = make_trainer(backbone, layout, router, router_rate=1e-3, lr=0.0, clip=1e9)
    moved = next(trainer.train([lane], 1)).delta_phi
    column = int(moved.abs().argmax())

    def loss(shift: float) -> float:
        lane.phi = router.initial(7)
        lane.phi[column] += shift
        return next(trainer.train([lane], 1)).losses[0]

    slope = (loss(0.05) - loss(-0.05)) / 0.1
    mixture.detach()
    assert abs(slope) > 1e-5
    # AdamW's first step has the size of the rate and the sign of minus the gradient
    assert math.copysign(1, moved[column].item()) == -math.copysign(1, slope)


def test_a_batch_of_fixed_shape_gives_the_same_step(backbone):
    """The filling that CUDA graphs need must not show in losses or gradients."""
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=3)
    trainer, mixture = make_trainer(backbone, layout, router, dropout=0.1)
    roomy = Capacity.of_steps(lanes)[0].joined(Capacity(tokens=1024, answers=512, sequences=6, longest=64))
    group = LaneGroup(trainer, 3, masked=False)
    results = []
    for capacity in (None, roomy):
        group.load(lanes)
        losses = [group.step(build_batch(lanes, s, 0.1, backbone.device, capacity)) for s in range(3)]
        experts, routers = zip(*(group.deltas(k) for k in range(3)), strict=True)
        results.append((torch.stack(losses), torch.stack(experts), torch.stack(routers)))
    mixture.detach()
    for plain, filled in zip(*results, strict=True):
        assert (plain - filled).abs().max() <= 1e-5


def test_a_few_recorded_sizes_hold_all_steps_the_largest_first():
    needs = [Capacity(512 * k, 512 * (9 - k), 8, 128) for k in range(1, 9)]
    found = levels(needs)
    assert [capacity.tokens for capacity in found] == [512 * 8, 512 * 7, 512 * 3]
    assert found[0].holds(found[1]) and all(found[0].holds(need) for need in needs)
    assert sum(found[2].holds(need) for need in needs) == 3
    assert levels(needs[:1]) == needs[:1]


def uneven_lanes(t: int, clients: int = 20) -> list[Lane]:
    """Round t of clients whose two kinds of examples, long and short ones, come in batches of their own."""
    lanes = []
    for client in range(clients):
        rng = np.random.default_rng(client)
        short, long = rng.integers(5, 80, 2)
        lengths = np.concatenate([rng.integers(20, 60, short), rng.integers(100, 300, long)])
        rows = [SimpleNamespace(ids=np.empty(n), answer_start=n - n // 4) for n in lengths]
        kinds = [np.arange(short), np.arange(short, len(rows))]
        schedule = local_schedule(kinds, 10, 8, t, client)
        lanes.append(Lane(ClientData(str(client), rows, torch.zeros(len(rows), 1)), schedule, None, None, ()))
    return lanes


@pytest.mark.parametrize("foresight", [True, False])
def test_what_is_recorded_at_first_holds_the_rounds_to_come(monkeypatch, foresight):
    """Nobody knows their batches yet, but they are of the same kinds."""
    steps, recorded = GraphedSteps(lambda batch: None), []
    monkeypatch.setattr(graphs, "build_batch", lambda *given: None)
    monkeypatch.setattr(steps, "_record", lambda batches: recorded.append(steps._recordings.update(batches)))
    if not foresight:
        monkeypatch.setattr(Capacity, "foreseen", lambda lanes, count: [])
    for t in range(20):
        lanes = uneven_lanes(t)
        capacities, needs = steps.prepare(lanes, 0.0, torch.device("cpu")), Capacity.of_steps(lanes)
        assert all(capacity.holds(need) for capacity, need in zip(capacities, needs, strict=True))
    assert (len(recorded) == 1) == foresight


@pytest.mark.parametrize("foresight", [True, False])
def test_groups_that_take_turns_are_recorded_once_for_all(monkeypatch, foresight):
    """Each has other clients, with longer examples than the ones before."""
    steps, recorded = GraphedSteps(lambda batch: None), []
    monkeypatch.setattr(graphs, "build_batch", lambda *given: None)
    monkeypatch.setattr(steps, "_record", lambda batches: recorded.append(steps._recordings.update(batches)))
    lanes = sorted(uneven_lanes(0, 40), key=lambda lane: sum(len(row.ids) for row in lane.data.examples))
    turns = [lanes[i : i + 8] for i in range(0, 40, 8)]
    for turn in turns:
        capacities = steps.prepare(turn, 0.0, torch.device("cpu"), turns if foresight else ())
        assert all(a.holds(b) for a, b in zip(capacities, Capacity.of_steps(turn), strict=True))
    assert (len(recorded) == 1) == foresight


def test_foreseen_steps_are_these_again_or_paired_anew_with_other_examples():
    lanes = uneven_lanes(0)
    lanes[0].schedule[5:] = []  # it ends before the others
    lengths = [[[len(e.ids) for e in lane.examples(i)] for i in range(10)] for lane in lanes]
    sums = np.array([[sum(own) for own in lane] for lane in lengths])  # [K, steps]
    needs, foreseen = Capacity.of_steps(lanes), Capacity.foreseen(lanes, 2000)
    assert [need.tokens for need in needs] == [-(-n // 512) * 512 for n in sums.sum(0)]
    assert [need.sequences for need in needs] == [8] * 10 and needs[0].longest == foreseen[0].longest == 320
    assert foreseen == Capacity.foreseen(lanes, 2000), "the same in every process"
    again, paired = (np.array([one.tokens for one in foreseen[i::2]]) - 256 for i in (0, 1))
    scatter = np.mean([sum(np.var(lane[i]) * len(lane[i]) for lane in lengths if lane[i]) for i in range(10)])
    assert again.mean() == pytest.approx(sums.sum(0).mean(), rel=0.03) == pytest.approx(paired.mean(), rel=0.03)
    assert again.std() == pytest.approx(math.sqrt(sums.sum(0).var() + scatter), rel=0.1)
    assert paired.std() == pytest.approx(math.sqrt(sums.var(1).sum() + scatter), rel=0.1)


def test_running_out_of_memory_halves_the_group_says_so_and_remembers(backbone, monkeypatch):
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=3)
    trainer, mixture = make_trainer(backbone, layout, router)
    expected = list(trainer.train(lanes, 1))
    real, sizes, said = trainer._train_group, [], []

    def tight(group, on_step):
        sizes.append(len(group))
        if len(group) > 1:
            raise torch.OutOfMemoryError("no room")
        return real(group, on_step)

    monkeypatch.setattr(trainer, "_train_group", tight)
    trainer.warn = said.append
    results = list(trainer.train(lanes, 3))
    assert sizes == [3, 2, 1, 1, 1] and "1 at a time" in said[-1]
    list(trainer.train(lanes, 3))
    assert sizes[5:] == [1, 1, 1], "the next round does not try again what did not fit"
    mixture.detach()
    for mine, theirs in zip(results, expected, strict=True):
        assert torch.equal(mine.delta_theta, theirs.delta_theta)


def test_room_is_made_once_nothing_of_the_attempt_is_held(backbone, monkeypatch):
    """A traceback would keep the tensors of the step that failed; and its steps are counted once."""
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=3, steps=4)
    trainer, mixture = make_trainer(backbone, layout, router)
    real, held, advanced = trainer._train_group, [], []

    def tight(group, on_step):
        batch = torch.zeros(3)
        held.append(weakref.ref(batch))
        if len(group) > 2:
            on_step(len(group))
            raise torch.OutOfMemoryError("no room")
        assert all(result() is None for result in results), "nor results that were handed on"
        return real(group, on_step)

    def make_room(lanes, real=trainer._make_room):
        assert held[-1]() is None
        real(lanes)

    results: list = []
    monkeypatch.setattr(trainer, "_train_group", tight)
    monkeypatch.setattr(trainer, "_make_room", make_room)
    for result in trainer.train(lanes, 3, advanced.append):
        results.append(weakref.ref(result))
        del result
    mixture.detach()
    assert len(held) == 3 and sum(advanced) == 3 * 4 and not trainer._turns


def test_a_lane_that_does_not_fit_alone_runs_its_layers_again(backbone, monkeypatch):
    layout, router = setup(backbone)
    lanes = make_lanes(backbone, layout, router, clients=2)
    trainer, mixture = make_trainer(backbone, layout, router)
    expected = list(trainer.train(lanes, 1))
    real, said = trainer._train_group, []

    def tight(group, on_step):
        if len(group) > 1 or not trainer.checkpointing:
            raise torch.OutOfMemoryError("no room")
        return real(group, on_step)

    monkeypatch.setattr(trainer, "_train_group", tight)
    trainer.warn = said.append
    results = list(trainer.train(lanes, 2))
    assert ["1 at a time" in said[0], "layers run twice" in said[1], len(said)] == [True, True, 2]
    for mine, theirs in zip(results, expected, strict=True):
        assert torch.equal(mine.delta_theta, theirs.delta_theta)
    monkeypatch.setattr(
        trainer, "_train_group", lambda group, on_step: (_ for _ in ()).throw(torch.OutOfMemoryError)
    )
    with pytest.raises(UserError, match="set a smaller training"):
        list(trainer.train(lanes, 1))
    mixture.detach()
