"""A small action-chunking transformer over state, in policyfit's plain dialect.

Shape suffixes: B batch, F features of the observation, K memory tokens, T time in a chunk, A action, D width.

Source: Zhao et al. (2023), "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware", section IV:
the action chunk and the decoder with one query an action; without cameras, encoder and latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from policyfit import ConfigError

SMALLEST_STD = 1e-4  # a feature that does not vary is centred, not blown up


class ActPolicy(nn.Module):
    """Predicts the next ``chunk`` actions at once and follows ``execute`` of them before it looks again.

    The statistics that standardise observations and actions are buffers, NaN until ``set_statistics``, so a
    checkpoint alone can act.

    Args:
        chunk: Actions predicted at once.
        execute: Actions followed before the next prediction, 1..chunk.
        state_dim: Width of ``observation.state``.
        environment_dim: Width of ``observation.environment_state``.
        action_dim: Width of ``action``.
        width: Width of the transformer, a multiple of ``heads``.
        tokens: Memory tokens made of the observation.
        layers: Decoder layers.
        heads: Attention heads.
        feedforward: Width of the layers' inner network.

    Raises:
        ConfigError: ``execute`` is not in 1..chunk.
    """

    fsdp_units = ("TransformerDecoderLayer",)  # gathered one at a time by trainer.distributed: fsdp

    obs_mean_F: Tensor
    obs_std_F: Tensor
    action_mean_A: Tensor
    action_std_A: Tensor

    def __init__(
        self,
        chunk: int = 16,
        execute: int = 8,
        state_dim: int = 4,
        environment_dim: int = 10,
        action_dim: int = 4,
        width: int = 64,
        tokens: int = 4,
        layers: int = 2,
        heads: int = 4,
        feedforward: int = 128,
    ) -> None:
        if not 1 <= execute <= chunk:
            raise ConfigError(f"ActPolicy.execute must be in 1..chunk, got execute={execute} with chunk={chunk}.")
        super().__init__()
        self.config: dict[str, Any] = {
            "chunk": chunk,
            "execute": execute,
            "state_dim": state_dim,
            "environment_dim": environment_dim,
            "action_dim": action_dim,
            "width": width,
            "tokens": tokens,
            "layers": layers,
            "heads": heads,
            "feedforward": feedforward,
        }
        features = state_dim + environment_dim
        self.register_buffer("obs_mean_F", torch.full((features,), torch.nan))
        self.register_buffer("obs_std_F", torch.full((features,), torch.nan))
        self.register_buffer("action_mean_A", torch.full((action_dim,), torch.nan))
        self.register_buffer("action_std_A", torch.full((action_dim,), torch.nan))

        layer = nn.TransformerDecoderLayer(
            width, heads, feedforward, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Sequential(nn.Linear(features, tokens * width), nn.Unflatten(-1, (tokens, width)))
        self.queries_TD = nn.Parameter(torch.randn(chunk, width))
        self.decoder = nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, action_dim)
        self.reset()

    def set_statistics(self, stats: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over mean and std of observations and actions, as ``Demonstrations.stats`` gives them.

        Raises:
            ConfigError: The width of a feature is not the policy's, or a number is not finite.
        """
        widths = {
            "observation.state": self.config["state_dim"],
            "observation.environment_state": self.config["environment_dim"],
            "action": self.config["action_dim"],
        }
        for key, width in widths.items():
            for name in ("mean", "std"):
                if stats[key][name].shape != (width,):
                    found = tuple(stats[key][name].shape)
                    raise ConfigError(f"The {name} of {key} has shape {found}, but this policy takes ({width},).")
                if not stats[key][name].isfinite().all():
                    raise ConfigError(f"The {name} of {key} is not finite: {stats[key][name].tolist()}.")
        state, environment = stats["observation.state"], stats["observation.environment_state"]
        self.obs_mean_F.copy_(torch.cat([state["mean"], environment["mean"]]))
        self.obs_std_F.copy_(torch.cat([state["std"], environment["std"]]).clamp(min=SMALLEST_STD))
        self.action_mean_A.copy_(stats["action"]["mean"])
        self.action_std_A.copy_(stats["action"]["std"].clamp(min=SMALLEST_STD))

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, L1 over standardised actions, and ``l1``, the same in units of the actions.

        Args:
            batch: ``observation.state`` (B, 4), ``observation.environment_state`` (B, 10), ``action``
                (B, T, 4) and ``action_is_pad`` (B, T); padded actions count for nothing.
        """
        target_BTA = (batch["action"] - self.action_mean_A) / self.action_std_A
        error_BTA = (self._predict(batch) - target_BTA).abs() * ~batch["action_is_pad"].unsqueeze(-1)
        error_A = error_BTA.sum((0, 1)) / (~batch["action_is_pad"]).sum()
        return error_A.mean(), {"l1": (error_A.detach() * self.action_std_A).mean()}

    def reset(self) -> None:
        """Forget the current plan: an episode begins."""
        self._plan_TBA: list[Tensor] = []

    @torch.no_grad()
    def select_action(self, observation: Mapping[str, Tensor]) -> Tensor:
        """The next action of each environment, (B, A) float32, from the plan or from a new one.

        Raises:
            ConfigError: The policy was never given statistics, so its actions would be NaN.
        """
        if not self._plan_TBA:
            if self.action_std_A.isnan().any():
                raise ConfigError(
                    "This ActPolicy has no normalisation statistics, so it cannot act.\n"
                    "Load a trained checkpoint, or call policy.set_statistics(Demonstrations().stats)."
                )
            action_BTA = self._predict(observation) * self.action_std_A + self.action_mean_A
            self._plan_TBA = list(action_BTA[:, : self.config["execute"]].unbind(1))
        return self._plan_TBA.pop(0)

    def _predict(self, observation: Mapping[str, Tensor]) -> Tensor:
        obs_BF = torch.cat([observation["observation.state"], observation["observation.environment_state"]], -1)
        memory_BKD = self.embed((obs_BF - self.obs_mean_F) / self.obs_std_F)
        queries_BTD = self.queries_TD.expand(len(obs_BF), -1, -1)
        action_BTA: Tensor = self.head(self.decoder(queries_BTD, memory_BKD))
        return action_BTA.float()  # standardised; float32 under autocast too
