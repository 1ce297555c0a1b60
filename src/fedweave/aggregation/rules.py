"""Asymmetric aggregation (paper, Eq. 4): experts at prototype level, the router at client level.

Both are streams: the server holds one running sum, whatever the number of clients.
"""

import torch

from fedweave.experts.layout import AdapterLayout


class ExpertAverage:
    """θ_m += Σ_i n(i,m) Δθ(i,m) / Σ_j n(j,m). An expert that nobody serves keeps its value; what all share is
    averaged over |D_i|."""

    def __init__(self, layout: AdapterLayout, device: torch.device):
        self.owner = layout.owner(device)  # [P]
        self.sum = torch.zeros(layout.size, device=device)
        self.weight = torch.zeros(layout.experts + 1, device=device)  # of every expert, and of the shared part

    def add(self, delta: torch.Tensor, counts: torch.Tensor, samples: float = 0.0, client: int = 0) -> None:
        """One client's Δθ [P] with its matched sample counts n(i,·) [M], of which a zero is a part not uploaded,
        and |D_i|. Whose it is matters to other rules."""
        counts = torch.cat([counts, counts.new_tensor([samples])]).to(self.sum)
        column_weight = counts[self.owner]
        self.sum += torch.where(column_weight > 0, delta.to(self.sum) * column_weight, 0.0)
        self.weight += counts

    def step(self) -> torch.Tensor:
        """The server's move, [P]."""
        return self.sum / self.weight.clamp(min=1e-12)[self.owner]


class ClientAverage:
    """φ += Σ_i |D_i| Δφ(i) / Σ_j |D_j|: one delta per client, from its whole trajectory."""

    def __init__(self, size: int, device: torch.device):
        self.sum = torch.zeros(size, device=device)
        self.weight = 0.0

    def add(self, delta: torch.Tensor, weight: float, client: int = 0) -> None:
        self.sum += delta.to(self.sum) * weight
        self.weight += weight

    def step(self, usual: torch.Tensor | None = None) -> torch.Tensor:
        return self.sum / max(self.weight, 1e-12)
