"""Say in what precision a step really ran, and stop a run in which it is not the one asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..strategies.errors import ConfigError
from .audit_recorder import POLICY, Recorder
from .audit_report import PrecisionReport
from .audit_table import print_report
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer.outcome import Outcome
    from ..trainer.trainer import Trainer


class PrecisionAudit(Callback):
    """Look at every op of one micro-batch, forward and backward, as it runs after autocast.

    The report is printed, written to ``RUN_DIR/precision_audit.json`` and summed up in the event
    "precision_audit". The audited micro-batch takes several times as long; its results are bit for bit those of a
    run without the audit, and all other steps run as if it were not there.

    A run in bf16 or fp16 whose audited micro-batch runs no matmul or convolution in it ends with a PrecisionError,
    before that step moves the weights.

    Args:
        at_step: The step whose first micro-batch is audited, from 1. A run that is resumed behind it audits the
            first step that it makes.

    Example:
        >>> Trainer(precision="bf16", callbacks=[PrecisionAudit()])  # doctest: +SKIP
    """

    def __init__(self, at_step: int = 1) -> None:
        if isinstance(at_step, bool) or not isinstance(at_step, int) or at_step < 1:
            raise ConfigError(f"PrecisionAudit.at_step must be a whole number of at least 1, got {at_step!r}.")
        self.at_step = at_step
        #: What was found; ``None`` before the audited step.
        self.report: PrecisionReport | None = None
        self._next = False
        self._recorder: Recorder | None = None
        self._step = 0

    def due(self, step: int) -> bool:
        """The step before the audited one: the next micro-batch is that of ``at_step``."""
        return step == self.at_step - 1

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        """Audit the next micro-batch."""
        self._next = True

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Audit the first micro-batch if its step is ``at_step``, or a later one of a run that is resumed."""
        self.report = None
        self._next = trainer.step >= self.at_step - 1

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        """Begin to look, if this is the micro-batch."""
        if self._next:
            self._begin(trainer, policy)

    def on_after_backward(self, trainer: Trainer, policy: nn.Module) -> None:
        """Report.

        Raises:
            PrecisionError: The precision computes in 16 bits, and no matmul or convolution did.
        """
        if self._recorder is not None:
            self._finish(trainer, policy, self._recorder)

    def on_update_end(self, trainer: Trainer, policy: nn.Module, outcome: Outcome) -> None:
        """A micro-batch that gave no loss had no backward: its window ends here, and the next one is audited."""
        if self._recorder is not None:
            self._leave()

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """Say so if there was nothing to audit."""
        if self.report is None:
            message = f"no step was audited: the run ended at step {trainer.step}, and at_step is {self.at_step}"
            trainer.event("warning", source="PrecisionAudit", message=message)

    def on_exception(self, trainer: Trainer, policy: nn.Module, exception: BaseException) -> None:
        """Stop looking."""
        self._leave()

    def teardown(self, trainer: Trainer, policy: nn.Module, stage: str) -> None:
        """Stop looking, whatever happened."""
        self._leave()

    def _begin(self, trainer: Trainer, policy: nn.Module) -> None:
        self._leave()  # the micro-batch before gave no loss
        # Settles the last update, so that an update that ends from now on is the audited one.
        self._step = trainer.step + 1
        self._recorder = Recorder(policy, with_modules=not _is_compiled(policy))
        if _is_compiled(policy) and not hasattr(TorchDispatchMode, "ignore_compile_internals"):
            return  # older torch would run a compiled policy op by op as soon as anything looks
        self._recorder.open()

    def _finish(self, trainer: Trainer, policy: nn.Module, recorder: Recorder) -> None:
        self._leave()
        self._next = False
        report = self.report = PrecisionReport(
            step=self._step,
            precision=trainer.precision.name,
            compute_dtype=trainer.precision.compute_dtype,
            device=str(trainer.device.device),
            compiled=_is_compiled(policy),
            recorder=recorder,
            with_parameters=frozenset(
                n or POLICY for n, m in policy.named_modules() if any(True for _ in m.parameters())
            ),
        )
        if trainer.is_main:
            print_report(report)
            (trainer.run_dir / "precision_audit.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        trainer.event(
            "precision_audit",
            audited_step=report.step,
            shares=report.shares,
            findings=report.findings,
            message=report.summary,
        )
        report.check()

    def _leave(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def _is_compiled(policy: nn.Module) -> bool:
    """Whether ``torch.compile`` was put on the policy or a part of it."""
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in policy.modules()
    )
