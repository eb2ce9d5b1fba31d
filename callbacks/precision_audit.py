"""Say in what precision a step really runs, and stop a run in which it is not the one asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import nn

from ..strategies.errors import ConfigError
from .audit_recorder import POLICY, Recorder
from .audit_report import PrecisionReport, print_report
from .callback import Callback
from .rehearsal import copied, rehearsing

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer


class PrecisionAudit(Callback):
    """Compute one micro-batch once more, before its turn, and look at every op of it, forward and backward.

    The rehearsal leaves no trace: the run goes on with the bits of one without the audit. What it saw is printed,
    written to ``RUN_DIR/precision_audit.json`` and summed up in the event "precision_audit". A run in bf16 or fp16
    that runs no matmul or convolution in it ends with a PrecisionError, before that step moves the weights.

    Args:
        at_step: The step whose first micro-batch is audited, from 1. A run that is resumed behind it audits the
            first step that it makes. Stand it behind callbacks that change batches in ``on_train_batch_start``.

    Example:
        >>> Trainer(precision="bf16", callbacks=[PrecisionAudit()])  # doctest: +SKIP
    """

    def __init__(self, at_step: int = 1) -> None:
        if isinstance(at_step, bool) or not isinstance(at_step, int) or at_step < 1:
            raise ConfigError(f"PrecisionAudit.at_step must be a whole number of at least 1, got {at_step!r}.")
        self.at_step = at_step
        #: What was found; ``None`` before the audited step.
        self.report: PrecisionReport | None = None
        self._next = self._failed = False

    def due(self, step: int) -> bool:
        """The step before the audited one: the next micro-batch is that of ``at_step``."""
        return step == self.at_step - 1

    def on_due(self, trainer: Trainer, policy: nn.Module) -> None:
        """Audit the next micro-batch."""
        self._next = True

    def on_fit_start(self, trainer: Trainer, policy: nn.Module) -> None:
        """Audit the first micro-batch if its step is ``at_step``, or a later one of a run that is resumed."""
        self.report, self._failed, self._next = None, False, trainer.step >= self.at_step - 1

    def on_train_batch_start(self, trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> None:
        """Rehearse the micro-batch and report, if it is the one; one that gives no loss is left for the next.

        A rehearsal that fails is an event, and the run goes on without the audit.

        Raises:
            PrecisionError: The precision computes in 16 bits, and no matmul or convolution did.
        """
        if not self._next:
            return
        try:
            report = _rehearse(trainer, policy, batch, batch_idx)
        except Exception as error:  # one of the policy itself comes again at the micro-batch's turn
            self._next, self._failed = False, True
            message = f"step {trainer.step + 1} could not be audited: {type(error).__name__}: {error}"
            trainer.event("warning", source="PrecisionAudit", message=message)
            return
        if report is None:
            return
        self._next, self.report = False, report
        if trainer.is_main:
            print_report(report)
            (trainer.run_dir / "precision_audit.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
        found = {"shares": report.shares, "findings": report.findings, "message": report.summary}
        trainer.event("precision_audit", audited_step=report.step, **found)
        report.check()

    def on_fit_end(self, trainer: Trainer, policy: nn.Module) -> None:
        """Say so if there was nothing to audit."""
        if self.report is None and not self._failed:
            message = f"no step was audited: the run ended at step {trainer.step}, and at_step is {self.at_step}"
            trainer.event("warning", source="PrecisionAudit", message=message)


def _rehearse(trainer: Trainer, policy: nn.Module, batch: Any, batch_idx: int) -> PrecisionReport | None:
    recorder = Recorder(policy)
    with rehearsing(trainer, policy):
        own = copied(batch)
        with recorder.watching():
            loss = trainer.training_loss(own, batch_idx)
            if loss is None:
                return None
            trainer.precision.backward(loss)
        return PrecisionReport(
            step=trainer.step + 1,
            precision=trainer.precision.name,
            compute_dtype=str(trainer.precision.compute_dtype).removeprefix("torch."),
            device=str(trainer.device.device),
            rows=recorder.rows,
            modules=frozenset(n or POLICY for n, m in policy.named_modules() if any(True for _ in m.parameters())),
        )
