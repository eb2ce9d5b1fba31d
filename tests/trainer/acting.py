"""Policies that ``load`` can import and build again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Acting(nn.Module):
    """Standardises by statistics that are buffers, and acts; ``config`` holds the arguments of its class."""

    mean: Tensor
    std: Tensor

    def __init__(self, width: int = 8, scale: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        self.config = {"width": width, "scale": scale, "dropout": dropout}
        self.scale = scale
        self.net = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 3))
        self.register_buffer("mean", torch.full((6,), torch.nan))
        self.register_buffer("std", torch.full((6,), torch.nan))
        self.grad_was_on: bool | None = None

    def set_statistics(self, stats: dict[str, Any]) -> None:
        self.mean.copy_(stats["x"]["mean"])
        self.std.copy_(stats["x"]["std"])

    def act(self, x: Tensor) -> Tensor:
        return self.scale * self.net((x - self.mean) / self.std)  # type: ignore[no-any-return]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.act(batch["x"]).float(), batch["y"])

    def select_action(self, observation: dict[str, Tensor]) -> Tensor:
        self.grad_was_on = torch.is_grad_enabled()
        return self.act(observation["x"])


@dataclass
class ActingConfig:
    width: int = 8
    scale: float = 1.0


class ConfiguredActing(Acting):
    """Takes its arguments as one dataclass, as LeRobot's policies do."""

    def __init__(self, config: ActingConfig) -> None:
        super().__init__(config.width, config.scale)
        self.config = config  # type: ignore[assignment]


class Discrete(Acting):
    """Gives numbers of actions, and how sure it is."""

    def select_action(self, observation: dict[str, Tensor]) -> Any:
        scores = self.act(observation["x"])
        return {"action": scores.argmax(-1), "scores": scores}


class Silent(Acting):
    """Does not say which arguments it got."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.config = {}


class Fixed(Acting):
    """Has no arguments to say."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {}
