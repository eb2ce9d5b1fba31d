"""A callback of one's own: a few quick rollouts while the policy trains."""

from __future__ import annotations

from pick_place_env import PREVIEW_SEED, PickPlace
from torch import nn

from policyfit import Callback, Trainer


class QuickRollout(Callback):
    """Every ``every`` steps, play ``episodes`` layouts that neither training nor the final evaluation sees.

    Python: ``Trainer(callbacks=[QuickRollout(every=250)])``. YAML: see the comment in RUN.yaml.
    """

    def __init__(self, every: int = 250, episodes: int = 10) -> None:
        self.every, self.episodes = every, episodes

    def due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        report = trainer.evaluate(policy, PickPlace(num_envs=self.episodes), episodes=self.episodes, seed=PREVIEW_SEED)
        trainer.event("quick_rollout", solved=report.successes, played=report.episodes)
