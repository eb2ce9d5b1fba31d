"""lightning-fabric's precision plugins as precision strategies.

What a plugin says about contexts and conversions is taken from it; backward, unscaling and the update stay on
policyfit's road. Nothing of lightning-fabric is imported here: a plugin brings its module along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import PrecisionError
from .facts import MachineFacts
from .mixed import BF16, FP16
from .precision import FullPrecision, PrecisionStrategy, check_parameters
from .scaler import GradScalerConfig

T = TypeVar("T")

# What a plugin's word means: in what it computes, and whether the weights stay float32.
_MEANINGS: dict[str, tuple[torch.dtype, bool]] = {
    "32-true": (torch.float32, True),
    "bf16-mixed": (torch.bfloat16, True),
    "16-mixed": (torch.float16, True),
    "bf16-true": (torch.bfloat16, False),
    "16-true": (torch.float16, False),
    "64-true": (torch.float64, False),
}
# The same words for what is the same here bit for bit, so that a checkpoint can be loaded without the plugin.
_OURS = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}
# The files of lightning_fabric.plugins.precision (or lightning.fabric's) whose verbs the road here replaces.
_BASE, _AMP = "fabric.plugins.precision.precision", "fabric.plugins.precision.amp"
_CANNOT_WORK = {
    "transformer_engine": "swaps in layers that compute in float8 and scale themselves, out of sight of the self-check",
    "bitsandbytes": "replaces the weights by quantised ones, which no optimizer here can move",
    "deepspeed": "leaves backward and step to DeepSpeed's engine, which the Trainer does not run",
    "fsdp": "belongs to Fabric's FSDP strategy, which shards the weights and brings its own scaler",
    "xla": "steps through torch_xla, for devices that the Trainer does not know",
}
_BYPASSED = (
    "pre_backward", "backward", "post_backward", "optimizer_step", "main_params", "unscale_gradients",
    "clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "state_dict", "load_state_dict", "teardown",
)  # fmt: skip


class FabricPlugin(Protocol):
    """What is taken from a plugin of lightning-fabric; hints are as they are there, since run files compare them."""

    precision: Any

    def forward_context(self) -> AbstractContextManager:  # type: ignore[type-arg]
        """Around the forward and the loss."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        """The module itself, its weights in the plugin's type."""

    def convert_input(self, data: Any) -> Any:
        """A batch or an observation in the plugin's type."""

    def convert_output(self, data: Any) -> Any:
        """Loss, metrics or actions in torch's default type."""


def is_fabric_plugin(thing: object) -> TypeGuard[FabricPlugin]:
    """Whether it is a precision plugin of lightning-fabric, of Lightning, or of somebody who derived one."""
    return any(cls.__module__.endswith(_BASE) for cls in type(thing).__mro__)


class FabricPrecision(PrecisionStrategy):
    """A lightning-fabric precision plugin; its name is ``no``, ``bf16`` or ``fp16`` where it is the same as that.

    A plugin for weights in 16 or 64 bits leaves no float32 masters, which the plan says. A policy that was made
    under the plugin's ``module_init_context`` is taken as it is.

    Args:
        plugin: An instance of ``Precision``, ``MixedPrecision``, ``HalfPrecision``, ``DoublePrecision``, or of a
            class derived from one of them that overrides contexts and conversions only.
        allow_emulated: As for ``BF16``.
        allow_cpu: As for ``FP16``.

    Raises:
        PrecisionError: The plugin cannot work on the road of policyfit's updates.

    Source: lightning_fabric.plugins.precision (2.6), and its use in lightning_fabric.wrappers.
    """

    def __init__(self, plugin: FabricPlugin, *, allow_emulated: bool = False, allow_cpu: bool = False) -> None:
        self.plugin, self.asked = plugin, str(plugin.precision)
        self.description = f"lightning-fabric's {type(plugin).__name__}({self.asked!r})"
        self._refuse_what_is_bypassed()
        if self.asked not in _MEANINGS:
            raise PrecisionError(
                f"{self.description} names none of {', '.join(_MEANINGS)}, so nothing could prove that it is in effect."
                "\nGive the class one of these as its attribute precision, or use precision='auto'."
            )
        self.compute_dtype, self.masters = _MEANINGS[self.asked]
        own = type(plugin).__module__.endswith((_BASE, _AMP))
        self.name = _OURS.get(self.asked, self.asked) if own else self.asked
        self._device_type: str | None = getattr(plugin, "device", None)
        scaler = getattr(plugin, "scaler", None)
        self._is_disabled = scaler is not None and not scaler.is_enabled()
        settings = None if scaler is None or self._is_disabled else _settings_of(scaler)
        self._rules: PrecisionStrategy = FullPrecision()
        if self.compute_dtype == torch.bfloat16:
            self._rules = BF16(allow_emulated=allow_emulated)
        elif self.compute_dtype == torch.float16:
            self._rules = FP16(settings, allow_cpu=allow_cpu)
        self._road = self._rules if self.masters else _WithoutMasters(self.compute_dtype)
        self.settings: GradScalerConfig | None = getattr(self._road, "settings", None)
        if self.asked == "16-true":
            self.note = (
                "16-true has neither float32 weights nor a loss scale: gradients below 6e-8 are lost, and those above "
                "65504 skip their update; precision='fp16' has both"
            )
        # Autocast converts op by op. Fabric converts what enters a module; a batch here holds the targets of the
        # loss too, which that would only round. Lightning's own Trainer leaves it out as well.
        self._converts_input = not self._owner("convert_input").endswith((_BASE, _AMP))
        self._converts_output = not self._owner("convert_output").endswith(_BASE)

    def _refuse_what_is_bypassed(self) -> None:
        for cls in type(self.plugin).__mro__:
            file = cls.__module__.rpartition(".")[2]
            if "fabric.plugins.precision." in cls.__module__ and file in _CANNOT_WORK:
                raise PrecisionError(
                    f"{self.description} cannot be used here: it {_CANNOT_WORK[file]}.\n"
                    "Use precision='auto', or one of lightning-fabric's MixedPrecision and HalfPrecision."
                )
        mine = [v for v in _BYPASSED if hasattr(type(self.plugin), v) and not self._owner(v).endswith((_BASE, _AMP))]
        if mine:
            raise PrecisionError(
                f"{self.description} brings its own {', '.join(mine)}, which the update here would bypass.\n"
                "Override contexts and conversions only, or use precision='auto'."
            )

    def _owner(self, verb: str) -> str:
        """The module of the class that defines a verb of the plugin."""
        return next(cls.__module__ for cls in type(self.plugin).__mro__ if verb in vars(cls))

    # Before a run ----------------------------------------------------------------------------------------------

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        """Refuse another device than the plugin was made for, and what ``BF16`` and ``FP16`` refuse."""
        if self._device_type is not None and torch.device(self._device_type).type != device.type:
            raise PrecisionError(
                f"{self.description} was made for device={self._device_type!r}, but the run is on {device}.\n"
                f"Make it with device={device.type!r}, or use precision='auto'."
            )
        if self._is_disabled:
            raise PrecisionError(
                f"The GradScaler of {self.description} is disabled, so gradients would underflow.\n"
                "Make it with enabled=True, or leave scaler out."
            )
        with self._same_rule():
            self._rules.check(device, facts)
        without_float64 = device.type == "mps" or (device.type == "xpu" and not facts.xpu[device.index or 0].has_fp64)
        if self.compute_dtype == torch.float64 and without_float64:
            raise PrecisionError(f"{self.description} needs float64, which {device} has not.\nUse precision='no'.")

    def check_native(self, device: torch.device, facts: MachineFacts) -> str | None:
        """What ``BF16`` says of the device, for plugins that compute in bfloat16."""
        with self._same_rule():
            return self._rules.check_native(device, facts)

    @contextmanager
    def _same_rule(self) -> Iterator[None]:
        try:
            yield
        except PrecisionError as error:
            raise PrecisionError(f"{self.description} is under the same rule: {error}") from error

    def setup(self, device: torch.device) -> None:
        """Bind the road to the device, and prove the plugin's own context and conversions there."""
        self._road.setup(device)
        ones = torch.ones(8, 8, dtype=torch.float32, device=device)
        if self._converts_input:
            ones = self.plugin.convert_input(ones)
        with self.autocast():
            found = (ones @ ones).dtype
        if found != self.compute_dtype:
            raise PrecisionError(
                f"With {self.description} a matmul on {device} computes in {found}, not in {self.compute_dtype}.\n"
                "Correct its forward_context and convert_input, or use precision='auto'."
            )

    # Around the forward ----------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> None:
        """Let the plugin convert the module, in place.

        Raises:
            PrecisionError: It made another module of it, or weights of another type than its name says.
        """
        if self.plugin.convert_module(module) is not module:
            raise PrecisionError(
                f"{self.description} made another module of the policy.\nConvert in place, or before fit."
            )
        wrong = [n for n, p in module.named_parameters() if p.requires_grad and p.dtype != self.compute_dtype]
        if self.masters:
            check_parameters(module.named_parameters())
        elif wrong:
            raise PrecisionError(
                f"{self.description} was to make every trainable weight {self.compute_dtype}, but {wrong[0]} is not.\n"
                "Correct its convert_module, or use precision='auto'."
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """The plugin's ``forward_context``."""
        return self.plugin.forward_context()

    def converting(self, step: Callable[..., T]) -> Callable[..., T]:
        """``step`` with its first argument and its result converted, as far as the plugin converts any."""
        if not self._converts_input and not self._converts_output:
            return step

        def converted(data: Any, *rest: Any) -> T:
            result: Any = step(self.plugin.convert_input(data) if self._converts_input else data, *rest)
            with _default_dtype(torch.float32):  # plugins convert to the default, which their context changes
                return self.plugin.convert_output(result)  # type: ignore[no-any-return]

        return converted

    # The road --------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """As the road does it: of the scaled loss for 16-mixed."""
        self._road.backward(loss)

    def unscale(self, optimizers: Sequence[Optimizer], gradients: Sequence[Tensor], non_finite: Tensor) -> None:
        """As the road does it."""
        self._road.unscale(optimizers, gradients, non_finite)

    def find_non_finite(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        """As the road does it."""
        self._road.find_non_finite(gradients, flag)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """As the road does it."""
        return self._road.norms(gradients)

    @property
    def scale(self) -> Tensor | None:
        """The loss scale of 16-mixed."""
        return self._road.scale

    @property
    def min_scale(self) -> float | None:
        """Its floor."""
        return self._road.min_scale

    def settle_scale(self) -> None:
        """As the road does it."""
        self._road.settle_scale()

    def state_dict(self) -> dict[str, Any] | None:
        """The scaler's state, that of ``FP16``."""
        return self._road.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the scaler's state."""
        self._road.load_state_dict(state)


class _WithoutMasters(FullPrecision):
    """The road for gradients that are not float32: what is measured on them is measured in float32 at least."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._measured_in = torch.promote_types(dtype, torch.float32)

    def find_non_finite(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        # Not the kernel itself, which takes no bfloat16 on cuda. A largest value is inf or NaN when one of them is.
        largest = torch.stack(torch._foreach_norm(list(gradients), float("inf"))).float()
        super().find_non_finite([largest], flag)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        norms = torch._foreach_norm(list(gradients), 2, dtype=self._measured_in)
        return torch.stack(norms).float()


def _settings_of(scaler: Any) -> GradScalerConfig:
    """The settings of torch's ``GradScaler``, and the scale at which it stands."""
    if type(scaler).__name__ != "GradScaler" or not type(scaler).__module__.startswith("torch."):
        raise PrecisionError(
            f"The plugin's scaler is a {type(scaler).__name__}, whose own steps the update here would bypass.\n"
            "Use a torch.amp.GradScaler, or precision='fp16' with grad_scaler."
        )
    scale = scaler.get_scale()
    return GradScalerConfig(
        init_scale=scale,
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        min_scale=min(1.0, scale),
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
