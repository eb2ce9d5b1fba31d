"""``load``: from a checkpoint to a policy that acts, which is what runs on the robot."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..strategies.device import DeviceStrategy
from ..strategies.errors import CheckpointError, ConfigError, PrecisionError
from ..strategies.fabric import FabricPlugin
from ..strategies.facts import MachineFacts, probe
from ..strategies.precision import PrecisionStrategy
from ..strategies.tree import map_tensors
from .checkpoint import CheckpointState, fill, read_checkpoint
from .newest import newest_checkpoint
from .pieces import in_memory
from .remote import local
from .resolve import resolve_device, resolve_precision
from .rollout import to_tensors


def load(
    checkpoint: str | Path,
    *,
    device: str | DeviceStrategy = "auto",
    precision: str | PrecisionStrategy | FabricPlugin | None = None,
    policy: nn.Module | None = None,
    weights: str = "raw",
    verify: bool = True,
) -> nn.Module:
    """The trained policy, in eval mode on ``device``: statistics included, actions in float32.

    ``select_action(observation)`` takes tensors or arrays from anywhere, runs under the precision's autocast
    without gradients, and gives float32 on the device; numbers of discrete actions stay whole.

    Args:
        checkpoint: A checkpoint's folder, ``last``, or a run's folder (its newest); also as an fsspec URL.
        device: Where it is to act; never another in silence.
        precision: ``None`` is the precision of the run.
        policy: A module of the trained class to fill, for a run whose ``config.yaml`` cannot build one.
        weights: "raw", or "ema" for the average that the callback ``EMA`` keeps.
        verify: ``False`` compares the sizes of the files and not their checksums, for a huge policy.

    Raises:
        CheckpointError: There is no whole checkpoint, or it does not fit the policy.
        ConfigError: There are no such weights, or the run's ``config.yaml`` does not build the policy; it names one for
            policies from a run file, or with an attribute ``config``: a dict or dataclass with their arguments.
        DeviceUnavailableError: The device is not here.
        PrecisionError: The device cannot run the precision.
    """

    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=3)

    with local(checkpoint, warn) as where:
        folder = newest_checkpoint(where, warn, verify=verify)
        saved = read_checkpoint(folder, verify=False, lazy=True)
        filled = _build(folder) if policy is None else policy
        model = _weights(saved, weights, folder)
    facts = probe()
    place = resolve_device(device, facts).value
    compute = _precision(precision, saved.manifest["precision"], place, facts)
    fill(filled, model, folder)
    warning = compute.check_native(place.device, facts)
    if warning is not None:
        warnings.warn(f"precision={compute.name!r} on {warning}.", stacklevel=2)
    place.setup()
    compute.setup(place.device)
    compute.convert_module(filled)
    filled.to(place.device).eval()
    if callable(getattr(filled, "select_action", None)):
        _make_act(filled, place, compute)
    return filled


def _precision(
    asked: str | PrecisionStrategy | FabricPlugin | None, of_run: str, place: DeviceStrategy, facts: MachineFacts
) -> PrecisionStrategy:
    try:
        return resolve_precision(of_run if asked is None else asked, place.device, facts).value
    except PrecisionError as error:
        if asked is not None:
            raise
        raise PrecisionError(
            f"The run's precision, {of_run}, is not to be had on {place.name}: {error}\n"
            "Or act in float32, which the weights are kept in: load(..., precision='no')."
        ) from error


def _weights(saved: CheckpointState, name: str, checkpoint: Path) -> dict[str, Tensor]:
    models = {"raw": saved.model, **saved.models}
    if not isinstance(name, str) or name not in models:
        raise ConfigError(
            f"{checkpoint} has no weights {name!r}, but {' and '.join(sorted(models))}.\n"
            "Averaged ones are in the checkpoints of a run with the callback EMA."
        )
    return {key: in_memory(value) for key, value in models[name].items()}


def _build(checkpoint: Path) -> nn.Module:
    """The policy that the run's ``config.yaml`` names: code of the user's own, as in any YAML run."""
    from .config import build_policy, read_run

    folder = checkpoint.resolve().parent
    config = folder.parent / "config.yaml"
    if folder.name != "checkpoints" or not config.exists():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run's folder, so there is no config.yaml that says which class its policy "
            "has; a checkpoint alone never names code.\nUse load(checkpoint, policy=YourPolicy(...))."
        )
    run = read_run([config])
    if "policy" not in run.values:
        raise ConfigError(
            f"{config} does not say how the policy was built: it was built in Python, and has no attribute config with "
            "the arguments of its class.\nUse load(checkpoint, policy=YourPolicy(...)), or give the class a config."
        )
    try:
        return build_policy(run)
    except ConfigError as error:
        remedy = "Or build the policy yourself: load(checkpoint, policy=YourPolicy(...))."
        raise ConfigError(f"{error}\n{remedy}") from error


def _make_act(policy: nn.Module, device: DeviceStrategy, precision: PrecisionStrategy) -> None:
    trained: Any = policy.select_action

    def select_action(observation: Any) -> Any:
        with torch.no_grad():
            action = precision.forward(trained, device.move(to_tensors(observation)))
        return map_tensors(action, _in_float32)

    vars(policy)["select_action"] = select_action


def _in_float32(action: Tensor, key: str) -> Tensor:
    return action.float() if action.is_floating_point() else action
