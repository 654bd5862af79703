"""The closed-form start of an exit head: ridge regression onto the states that the borrowed block expects.

One streaming pass accumulates X'X and X'Y in float64; the solution is W = (X'X + lambda I)^-1 X'Y, means removed.
"""

import torch
from torch import Tensor, nn


class Bridge(nn.Module):
    """One linear map per draft step, from [tap, recalled deep states] to the borrowed block's input.

    Step j = 1, 2, ... reads the tap of its own position (in a parallel draft: of the last token, j - 1 before it) and
    the deep states of the position j before it, the last ones known when that step is drafted. Steps beyond
    ``num_maps`` use the last map. With ``has_feedback`` steps behind the first read what the exit made itself instead.
    """

    def __init__(self, hidden_size: int, num_recalls: int, num_maps: int, has_feedback: bool = False) -> None:
        super().__init__()
        width = hidden_size * (1 + num_recalls)
        self.maps = nn.ModuleList(nn.Linear(width, hidden_size) for _ in range(num_maps))
        self.feedback: nn.Linear | None = nn.Linear(2 * hidden_size, hidden_size) if has_feedback else None

    def forward(self, taps: Tensor, recalls: Tensor | None, step: int = 1) -> Tensor:
        """taps [B, R, D], recalls [B, R, n D] as ``step`` reads them (None without recall) -> [B, R, D]."""
        inputs = taps if recalls is None else torch.cat([taps, recalls], dim=-1)
        return self.maps[min(step, len(self.maps)) - 1](inputs)

    def again(self, embedded: Tensor, normed: Tensor) -> Tensor:
        """Input states of the tokens drafted last, and the exit's own normed states before them -> [B, R, D]."""
        assert self.feedback is not None
        return self.feedback(torch.cat([embedded, normed], dim=-1))


class Correction(nn.Module):
    """What a row of a parallel draft lacks, the token before it: a bias of low rank on its logits.

    The first-order head of DSpark. Both tokens are counted in the drafted vocabulary V_d. Starts at zero.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.before, self.after = nn.Embedding(vocab_size, rank), nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.after.weight)

    def forward(self, places: Tensor) -> Tensor:
        """Places [A] of the tokens before in the drafted vocabulary, -1 for one outside it -> biases [A, V_d]."""
        return self.after(self.before(places.clamp(min=0)) * (places >= 0)[:, None])


class StateCorrection(nn.Module):
    """The same by a small network on the row and the token before it, which changes the row's normed state."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.own, self.before = nn.Linear(hidden_size, rank), nn.Linear(hidden_size, rank, bias=False)
        self.after = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.after.weight)

    def forward(self, normed: Tensor, embedded: Tensor) -> Tensor:
        """Normed states and input states of the tokens before, [..., D] each -> corrected states [..., D]."""
        return normed + self.after(nn.functional.silu(self.own(normed) + self.before(embedded)))


class RidgeAccumulator:
    """Sums of a ridge regression from X [N, P] to Y [N, Q], kept in float64."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.num_rows = 0
        self.xx = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
        self.xy = torch.zeros(num_inputs, num_outputs, dtype=torch.float64)
        self.x_sum = torch.zeros(num_inputs, dtype=torch.float64)
        self.y_sum = torch.zeros(num_outputs, dtype=torch.float64)
        self.yy = 0.0  # sum of squares

    def add(self, x: Tensor, y: Tensor) -> None:
        """Count rows x [N, P], y [N, Q]; products are made in float32, sums in float64."""
        x, y = x.float(), y.float()
        self.num_rows += x.shape[0]
        self.xx += (x.T @ x).double().cpu()
        self.xy += (x.T @ y).double().cpu()
        self.x_sum += x.sum(0).double().cpu()
        self.y_sum += y.sum(0).double().cpu()
        self.yy += float(y.double().square().sum())

    def error(self, weight: Tensor, bias: Tensor) -> float:
        """Mean squared error, on the rows added, of a map ``weight`` [Q, P] and ``bias`` [Q]."""
        w, b = weight.double(), bias.double()
        made = (w @ self.xx * w).sum() + 2 * (w @ self.x_sum) @ b + self.num_rows * b @ b
        together = (w.T * self.xy).sum() + self.y_sum @ b
        return float(self.yy - 2 * together + made) / max(self.num_rows, 1)

    def solve(self, ridge: float = 1e-3) -> tuple[Tensor, Tensor]:
        """Weight [Q, P] and bias [Q] in float32; ``ridge`` is relative to the mean variance of the inputs."""
        if self.num_rows == 0:
            raise ValueError("no rows were added")
        x_mean, y_mean = self.x_sum / self.num_rows, self.y_sum / self.num_rows
        covariance = self.xx / self.num_rows - torch.outer(x_mean, x_mean)
        cross = self.xy / self.num_rows - torch.outer(x_mean, y_mean)
        strength = ridge * covariance.diagonal().mean()
        eye = torch.eye(len(x_mean), dtype=torch.float64)
        weight = torch.linalg.solve(covariance + strength * eye, cross)  # [P, Q]
        return weight.T.float().contiguous(), (y_mean - x_mean @ weight).float()
