"""What clients of one process compute with: the frozen backbone, experts on it, and the lockstep trainer."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import Encoded
from fedweave.config import Config, TrainingConfig
from fedweave.console import Console
from fedweave.discovery.clusterers import Buckets, discover_all
from fedweave.errors import UserError
from fedweave.evaluation.losses import example_losses
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.federation.client import Client
from fedweave.federation.recent import Found, Recent
from fedweave.router.mlp import RouterLayout
from fedweave.streams import stream_key
from fedweave.training.batch import Lane
from fedweave.training.fit import lanes_that_fit
from fedweave.training.lockstep import LaneResult, LockstepTrainer
from fedweave.training.narrow import narrowed
from fedweave.training.private import PrivateTrainer

_IN_MEMORY = 1 << 25  # bytes of vectors; more go to disk


class Compute:
    """All clients of a simulation share one; a site has its own."""

    def __init__(self, backbone: Backbone, config: Config, console: Console, recent: Recent | None = None):
        self.backbone, self.config, self.console, self.recent = backbone, config, console, recent
        backbone.check_fp8(config.training.fp8)
        self.layers = backbone.linear_layers(config.experts.target_modules)
        self.adapters: VectorBuffer | None = None  # warmup adapters of all buckets, until the server asks for them
        self._mixtures: dict[AdapterLayout, Mixture] = {}  # two at most: what trains and what is tested
        self._trainer: LockstepTrainer | None = None

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def mixture(self, layout: AdapterLayout) -> Mixture:
        """Experts of this layout on the backbone. Two take turns; a third drives both out."""
        if layout not in self._mixtures:
            if len(self._mixtures) == 2:
                self.detach()
            self._mixtures[layout] = Mixture(
                self.layers, layout, self.config.experts.alpha, self.config.experts.span
            )
        return self._mixtures[layout]

    def detach(self) -> None:
        if self._trainer is not None:
            self._trainer.release()
        for mixture in self._mixtures.values():
            mixture.detach()
        self._mixtures, self._trainer = {}, None

    def recall(self, kind: str, causes: Iterable[object], make: Callable[[], Found]) -> Found:
        """What ``make`` gives, or gave in an earlier run of this process with the same backbone and ``causes``."""
        if self.recent is None:
            return make()
        backbone = (self.config.backbone, self.backbone.fingerprint, self.device)
        found, known = self.recent.of(kind, chain(backbone, causes), make)
        if known:
            self.console.say(f"{kind}: as in an earlier run")
        return found

    def cluster(self, clients: Sequence[Client]) -> list[Buckets]:
        # scikit-learn takes 32-bit seeds
        seeds = [stream_key("clusters", self.config.seed, client.index) % 2**32 for client in clients]
        features = [client.data.features.numpy() for client in clients]

        def make() -> list[Buckets]:
            progress = self.console.progress("clustering", len(clients), "clients")
            found = discover_all(features, self.config.discovery, seeds, progress.advance, self.device)
            progress.close()
            return found

        found = self.recall("clustering", (self.config.discovery, seeds, *features), make)
        return [replace(one, members=[rows.copy() for rows in one.members]) for one in found]

    def losses(
        self, layout: AdapterLayout, theta: torch.Tensor, examples: Sequence[Encoded], gates: torch.Tensor
    ) -> torch.Tensor:
        """[n] of examples under these experts, with gates [n, M]."""
        return example_losses(self.backbone, examples, self.mixture(layout), theta, gates)

    def train(
        self,
        layout: AdapterLayout,
        router: RouterLayout | None,
        lanes: Sequence[Lane],
        label: str,
        transient: bool = False,
        training: TrainingConfig | None = None,
        pace: float = 1.0,
    ) -> Iterator[LaneResult]:
        """Train lanes and hand their results out one by one, in order; with ``training`` in place of the run's, and
        at this share of its rates."""
        narrow = narrowed(layout, lanes)
        if narrow is not None:
            results = self.train(narrow.layout, router, narrow.lanes, label, transient, training, pace)
            yield from narrow.widened(results)
            return
        training = training or self.config.training
        trainer = self._trainer_for(layout, router, training)
        trainer.pace = pace
        fit = trainer.fits.get(len(lanes))
        if fit is None:  # once: what the trainer keeps for the next round is not free then
            fit = trainer.fits[len(lanes)] = lanes_that_fit(self.backbone, layout, lanes, training)
            if len(lanes) > 1 and training.clients_per_step == "auto":
                self.console.say(f"{label}: {min(fit.lanes, len(lanes))} of {len(lanes)} at a time ({fit.why})")
        trainer.checkpointing = fit.checkpointing
        steps = sum(len(lane.schedule) for lane in lanes)
        progress = self.console.progress(label, steps, "steps", transient)
        for done, result in enumerate(trainer.train(lanes, fit.lanes, progress.advance), 1):
            if done == len(lanes):  # before the last: whoever takes as many as there are never comes back
                progress.close()
            yield result

    def gradients(self, layout: AdapterLayout, lane: Lane) -> Iterator[torch.Tensor]:
        """Of every example of the lane's first batch by itself, [n, P] of some at a time."""
        trainer = self._trainer_for(layout, None, self.config.training)
        assert isinstance(trainer, PrivateTrainer)
        return trainer.gradients(lane)

    def _trainer_for(
        self, layout: AdapterLayout, router: RouterLayout | None, training: TrainingConfig
    ) -> LockstepTrainer:
        """The trainer of this layout, kept over rounds together with what it has recorded."""
        router = router.trained if router is not None else None
        mixture, last, config = self.mixture(layout), self._trainer, self.config
        if last is None or last.mixture is not mixture or last.router != router or last.config != training:
            if last is not None:
                last.release()
            trainer = PrivateTrainer if config.privacy.level == "example" else LockstepTrainer
            last = trainer(self.backbone, mixture, router, training, config.experts.dropout, config.router.lr)
            last.warn = self.console.warn
            self._trainer = last
        return last


Unit = tuple[int, int]  # a client's index, and one of its buckets


class VectorBuffer:
    """Float32 vectors of one length, one for each bucket of a client, that are kept between two steps."""

    def __init__(self, width: int):
        self.width, self.count = width, 0
        self._rows: dict[Unit, int] = {}  # where vectors lie
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - lives as long as the buffer

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._rows

    def append(self, unit: Unit, vector: torch.Tensor) -> None:
        """vector [width]"""
        try:
            self._file.seek(4 * self.width * self.count)
            self._file.write(vector.detach().float().cpu().contiguous().numpy().tobytes())
        except OSError as error:
            raise UserError(
                f"warmup adapters do not fit into {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a "
                "folder with more space."
            ) from error
        self._rows[unit] = self.count
        self.count += 1

    def read(self, unit: Unit) -> torch.Tensor:
        self._file.seek(4 * self.width * self._rows[unit])
        return torch.from_numpy(np.frombuffer(self._file.read(4 * self.width), dtype=np.float32).copy())
