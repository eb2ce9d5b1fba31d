"""The training loop. It reads like its pseudocode in ``callbacks/hooks.py``; everything else is elsewhere."""

from __future__ import annotations

from contextlib import nullcontext

from .run import Run

_NOTHING = nullcontext()


def train(run: Run) -> None:
    """Train until the run has the steps or epochs it was asked for, or somebody stops it."""
    try:
        _train(run)
    except Exception as error:
        run.fail(error)  # raises it, unless other ranks are to end with this one


def _train(run: Run) -> None:
    trainer, policy, adapter = run.trainer, run.policy, run.adapter
    precision, distribution, updater = run.precision, run.distribution, run.updater
    counters, means, step = run.counters, run.means, distribution.through(adapter.module, adapter.training_step)
    batch_start = run.callbacks.bound["on_train_batch_start"]
    before_backward = run.callbacks.bound["on_before_backward"]
    after_backward = run.callbacks.bound["on_after_backward"]
    batch_end = run.callbacks.bound["on_train_batch_end"]

    while not run.done:
        for batch, index, divisor, closes in run.begin_epoch():
            weight = 1.0 / divisor
            run.in_window, run.backward_is_done = True, False
            for hook in batch_start:
                hook(trainer, policy, batch, index)
            with _NOTHING if closes else distribution.accumulating(adapter.module):
                loss, metrics = precision.forward(step, batch, index)
                if loss is not None:
                    share = loss if divisor == 1.0 else loss / divisor
                    for hook in before_backward:
                        hook(trainer, policy, share)
                    precision.backward(share)
                    run.backward_is_done = closes
                    for hook in after_backward:
                        hook(trainer, policy)
                    means.add("train/loss", loss, weight)
                elif closes:
                    distribution.contribute_nothing(adapter.module)
                    run.backward_is_done = True
            for name, value in metrics.items():
                means.add(f"train/{name}", value, weight)
            counters.micro_batches += 1
            counters.batch_in_epoch = index + 1
            if closes:
                updater.apply()
                run.in_window = False
            if batch_end:
                outputs = {**metrics, "loss": None if loss is None else loss.detach()}
                for hook in batch_end:
                    hook(trainer, policy, outputs, batch, index)
            if closes and run.something_is_due():
                run.at_step()
                if run.done:
                    return
        run.between_windows = True
        run.end_epoch()
        run.between_windows = False
