"""RUN.yaml as a Python script: record, imitate, roll out. ``python examples/pick_place/train.py``"""

from __future__ import annotations

import argparse

import torch
from pick_place_data import Demonstrations
from pick_place_env import EVALUATION_SEED, PickPlace
from pick_place_policy import ActPolicy
from torch.utils.data import DataLoader

from policyfit import Trainer, WarmupCosine


class PickPlacePolicy(ActPolicy):
    """The policy together with its data and its optimizer, so that ``fit(policy)`` needs nothing else."""

    steps = 1000

    def train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(Demonstrations(split="train"), batch_size=64, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        return DataLoader(Demonstrations(split="val"), batch_size=64)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-4)
        schedule = WarmupCosine(optimizer, warmup_steps=100, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="bf16", help="no, bf16, fp16 or auto (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=PickPlacePolicy.steps, help="default: %(default)s")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    policy = PickPlacePolicy()
    policy.steps = arguments.steps

    trainer = Trainer(
        device="auto",
        precision=arguments.precision,
        max_steps=arguments.steps,
        clip_norm=1.0,
        val_every=250,
        seed=0,
    )
    trainer.fit(policy)
    print(trainer.evaluate(policy, PickPlace(), episodes=50, seed=EVALUATION_SEED).summary())


if __name__ == "__main__":
    main()
