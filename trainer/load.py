"""``load``: from a checkpoint to a policy that acts, which is what runs on the robot."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..strategies.device import DeviceStrategy
from ..strategies.errors import CheckpointError, ConfigError
from ..strategies.facts import probe
from ..strategies.precision import PrecisionStrategy
from .checkpoint import newest_checkpoint, read_checkpoint
from .resolve import resolve_device, resolve_precision
from .state import load_policy


def load(
    checkpoint: str | Path,
    *,
    device: str | DeviceStrategy = "auto",
    precision: str | PrecisionStrategy | None = None,
    policy: nn.Module | None = None,
) -> nn.Module:
    """The trained policy, in eval mode on ``device``: statistics included, actions in float32.

    ``select_action(observation)`` takes tensors or arrays from anywhere, runs under the precision's autocast
    without gradients, and gives float32 on the device.

    Args:
        checkpoint: A checkpoint's folder, ``last``, or a run's folder (its newest).
        device: Where it is to act; never another in silence.
        precision: ``None`` is the precision of the run.
        policy: A module of the trained class to fill, for a run whose ``config.yaml`` cannot build one.

    Raises:
        CheckpointError: There is no whole checkpoint, or it does not fit the policy.
        ConfigError: The run's ``config.yaml`` does not build the policy.
        DeviceUnavailableError: The device is not here.
        PrecisionError: The device cannot run the precision.
    """
    folder = newest_checkpoint(Path(checkpoint), lambda text: warnings.warn(text, stacklevel=2))
    saved = read_checkpoint(folder, verify=False)
    facts = probe()
    place = resolve_device(device, facts).value
    compute = resolve_precision(
        saved.manifest["precision"] if precision is None else precision, place.device, facts
    ).value
    filled = _build(folder) if policy is None else policy
    load_policy(filled, saved.model, folder)
    place.setup()
    compute.setup(place.device)
    filled.to(place.device).eval()
    if callable(getattr(filled, "select_action", None)):
        _make_act(filled, place, compute)
    return filled


def _build(checkpoint: Path) -> nn.Module:
    """The policy that the run's ``config.yaml`` names: code of the user's own, as in any YAML run."""
    from .config import build_policy, read_run

    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.exists():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run's folder, so there is no config.yaml that says which class its policy "
            "has; a checkpoint alone never names code.\nUse load(checkpoint, policy=YourPolicy(...))."
        )
    try:
        return build_policy(read_run([config]))
    except ConfigError as error:
        raise ConfigError(f"{error}\nOr build the policy yourself: load(checkpoint, policy=YourPolicy(...)).") from error


def _make_act(policy: nn.Module, device: DeviceStrategy, precision: PrecisionStrategy) -> None:
    trained: Any = policy.select_action

    def select_action(observation: Any) -> Tensor:
        with torch.no_grad(), precision.autocast():
            action: Tensor = trained(device.move(observation))
        return action.float()

    vars(policy)["select_action"] = select_action
