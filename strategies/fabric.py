"""lightning-fabric's precision plugins as precision strategies.

What a plugin says about contexts and conversions is taken from it; backward, unscaling and the update stay on
policyfit's road. Nothing of lightning-fabric is imported here: a plugin brings its module along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from .errors import PrecisionError
from .facts import MachineFacts
from .formats import has_float64
from .mixed import BF16, FP16
from .precision import FullPrecision, PrecisionStrategy, check_parameters
from .scaler import GradScalerConfig

T = TypeVar("T")

_WORDS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
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


def fabric_precision(plugin: FabricPlugin, *, allow_emulated: bool = False, allow_cpu: bool = False) -> FabricPrecision:
    """The strategy for a lightning-fabric precision plugin; ``no``, ``bf16`` or ``fp16`` by name where it is that.

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
    _refuse_what_is_bypassed(plugin)
    match str(plugin.precision):
        case "32-true":
            return FabricFull(plugin)
        case "bf16-mixed":
            return FabricBF16(plugin, allow_emulated=allow_emulated)
        case "16-mixed":
            return FabricFP16(plugin, grad_scaler=_settings_of(plugin), allow_cpu=allow_cpu)
        case "bf16-true":
            return FabricTrue(plugin, rules=BF16(allow_emulated=allow_emulated))
        case "16-true":
            return FabricTrue(plugin, rules=FP16(allow_cpu=allow_cpu))
        case "64-true":
            return FabricTrue(plugin, rules=_Float64())
    raise PrecisionError(
        f"{_description(plugin)} names none of {', '.join(_WORDS)}, so nothing could prove that it is in effect."
        "\nGive the class one of these as its attribute precision, or use precision='auto'."
    )


def _refuse_what_is_bypassed(plugin: FabricPlugin) -> None:
    for cls in type(plugin).__mro__:
        file = cls.__module__.rpartition(".")[2]
        if "fabric.plugins.precision." in cls.__module__ and file in _CANNOT_WORK:
            raise PrecisionError(
                f"{_description(plugin)} cannot be used here: it {_CANNOT_WORK[file]}.\n"
                "Use precision='auto', or one of lightning-fabric's MixedPrecision and HalfPrecision."
            )
    mine = [v for v in _BYPASSED if hasattr(type(plugin), v) and not _owner(plugin, v).endswith((_BASE, _AMP))]
    if mine:
        raise PrecisionError(
            f"{_description(plugin)} brings its own {', '.join(mine)}, which the update here would bypass.\n"
            "Override contexts and conversions only, or use precision='auto'."
        )


def _description(plugin: FabricPlugin) -> str:
    return f"lightning-fabric's {type(plugin).__name__}({str(plugin.precision)!r})"


def _owner(plugin: FabricPlugin, verb: str) -> str:
    """The module of the class that defines a verb of the plugin."""
    return next(cls.__module__ for cls in type(plugin).__mro__ if verb in vars(cls))


class FabricPrecision(PrecisionStrategy):
    """A plugin's contexts and conversions, mixed into the precision whose road its updates walk.

    ``fabric_precision`` chooses among the classes that do so; ``road`` goes to that precision.
    """

    def __init__(self, plugin: FabricPlugin, **road: Any) -> None:
        super().__init__(**road)
        self.plugin, self.asked, self.description = plugin, str(plugin.precision), _description(plugin)
        self._remedy = f"Correct forward_context and convert_input of {self.description}, or use precision='auto'."
        # The plugin's own word, unless it is the same as a precision of ours bit for bit: then a checkpoint can be
        # loaded without the plugin.
        if not (self.masters and type(plugin).__module__.endswith((_BASE, _AMP))):
            self.name = self.asked
        # Autocast converts op by op. Fabric converts what enters a module; a batch here holds the targets of the
        # loss too, which that would only round. Lightning's own Trainer leaves it out as well.
        self._converts_input = not _owner(plugin, "convert_input").endswith(_AMP)

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        """Refuse another device than the plugin was made for, and what the precision itself refuses."""
        made_for = getattr(self.plugin, "device", None)
        if made_for is not None and torch.device(made_for).type != device.type:
            raise PrecisionError(
                f"{self.description} was made for device={made_for!r}, but the run is on {device}.\n"
                f"Make it with device={device.type!r}, or use precision='auto'."
            )
        with self._same_rule():
            super().check(device, facts)

    def check_native(self, device: torch.device, facts: MachineFacts) -> str | None:
        """What ``BF16`` says of the device, for plugins that compute in bfloat16."""
        with self._same_rule():
            return super().check_native(device, facts)

    @contextmanager
    def _same_rule(self) -> Iterator[None]:
        try:
            yield
        except PrecisionError as error:
            raise PrecisionError(f"{self.description} is under the same rule: {error}") from error

    def with_grad_scaler(self, settings: GradScalerConfig | Mapping[str, Any]) -> PrecisionStrategy:
        """Refused: the scaler is the plugin's, where it has one."""
        return PrecisionStrategy.with_grad_scaler(self, settings)

    def convert_module(self, module: nn.Module) -> None:
        """Let the plugin convert the module, in place.

        Raises:
            PrecisionError: It made another module of it, or weights of another type than its name says.
        """
        if self.plugin.convert_module(module) is not module:
            raise PrecisionError(
                f"{self.description} made another module of the policy.\nConvert in place, or before fit."
            )
        if self.masters:
            check_parameters(module.named_parameters())
            return
        wrong = [n for n, p in module.named_parameters() if p.requires_grad and p.dtype != self.compute_dtype]
        if wrong:
            raise PrecisionError(
                f"{self.description} was to make every trainable weight {self.compute_dtype}, but {wrong[0]} is not.\n"
                "Correct its convert_module, or use precision='auto'."
            )

    def autocast(self) -> AbstractContextManager[Any]:
        """The plugin's ``forward_context``."""
        return self.plugin.forward_context()

    def forward(self, step: Callable[..., T], data: Any, *rest: Any) -> T:
        """``step(data, *rest)`` in the plugin's context, with ``data`` and the result converted as it says."""
        result: Any = super().forward(step, self._converted(data), *rest)
        return self.plugin.convert_output(result)  # type: ignore[no-any-return]

    def _converted(self, data: Any) -> Any:
        return self.plugin.convert_input(data) if self._converts_input else data

    def _dtype_of_a_matmul(self, data: Tensor) -> torch.dtype:
        return super()._dtype_of_a_matmul(self._converted(data))


class FabricFull(FabricPrecision, FullPrecision):
    """``32-true``."""


class FabricBF16(FabricPrecision, BF16):
    """``bf16-mixed``."""


class FabricFP16(FabricPrecision, FP16):
    """``16-mixed``, with the settings of the plugin's scaler."""

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        """Refuse a scaler that is off, too."""
        super().check(device, facts)
        scaler = getattr(self.plugin, "scaler", None)
        if scaler is not None and not scaler.is_enabled():
            raise PrecisionError(
                f"The GradScaler of {self.description} is disabled, so gradients would underflow.\n"
                "Make it with enabled=True, or leave scaler out."
            )


class _WithoutMasters(FullPrecision):
    """The road for gradients that are not float32: what is measured on them is measured in float32 at least.

    Args:
        rules: The precision whose type the weights have and whose demands on the device hold.
    """

    masters = False

    def __init__(self, rules: PrecisionStrategy) -> None:
        self.rules, self.compute_dtype = rules, rules.compute_dtype
        if self.compute_dtype == torch.float16:
            self.note = (
                "16-true has neither float32 weights nor a loss scale: gradients below 6e-8 are lost, and those above "
                "65504 skip their update; precision='fp16' has both"
            )

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        self.rules.check(device, facts)

    def check_native(self, device: torch.device, facts: MachineFacts) -> str | None:
        return self.rules.check_native(device, facts)

    def find_non_finite(self, gradients: Sequence[Tensor], flag: Tensor) -> None:
        # Not the kernel itself, which takes no bfloat16 on cuda. A largest value is inf or NaN when one of them is.
        largest = torch.stack(torch._foreach_norm(list(gradients), float("inf"))).float()
        super().find_non_finite([largest], flag)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        return torch.stack(torch._foreach_norm(list(gradients), 2, dtype=dtype)).float()


class FabricTrue(FabricPrecision, _WithoutMasters):
    """``bf16-true``, ``16-true`` and ``64-true``: weights, gradients and optimizer state in that type too."""


class _Float64(FullPrecision):
    """The rule of ``64-true``."""

    compute_dtype = torch.float64

    def check(self, device: torch.device, facts: MachineFacts) -> None:
        if not has_float64(device, facts):
            raise PrecisionError(f"precision='64-true' needs float64, which {device} has not.\nUse precision='no'.")


def _settings_of(plugin: FabricPlugin) -> GradScalerConfig | None:
    """The settings of the plugin's scaler, with the scale at which it stands; ``None`` without one that is on."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
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
