"""The training loop. It reads like its pseudocode in ``callbacks/hooks.py``; everything else is elsewhere."""

from __future__ import annotations

from .failure import end_together
from .run import Run


def train(run: Run) -> None:
    """Train until the run has the steps or epochs it was asked for, or somebody stops it."""
    run.distribution.gather(None, "the first batch")  # all are ready
    try:
        run.catch_up()
        _train(run)
        run.finish()
    except KeyboardInterrupt:  # a launcher sends it to all ranks, so there is nobody to tell
        raise
    except BaseException as error:
        end_together(run, error)  # raises it, unless other ranks are to end with this one


def _train(run: Run) -> None:
    trainer, policy, adapter, place = run.trainer, run.policy, run.adapter, run.place
    precision, distribution, updater = run.precision, run.distribution, run.updater
    counters, means, step = run.counters, run.means, distribution.through(adapter.module, adapter.training_step)
    batch_start = run.callbacks.bound["on_train_batch_start"]
    before_backward = run.callbacks.bound["on_before_backward"]
    after_backward = run.callbacks.bound["on_after_backward"]
    batch_end = run.callbacks.bound["on_train_batch_end"]

    while not run.done:
        for batch, index, divisor, remaining, next_window in run.begin_epoch():
            weight, closes = 1.0 / divisor, remaining == 0
            place.enter(index, index + 1 + remaining, updater.applied)
            run.weight = weight
            for hook in batch_start:
                hook(trainer, policy, batch, index)
            with distribution.micro_batch(adapter.module, closes=closes):
                loss, metrics = precision.forward(step, batch, index)
                if loss is not None:
                    share = loss if divisor == 1.0 else loss / divisor
                    for hook in before_backward:
                        hook(trainer, policy, share)
                    if weight:
                        precision.backward(share)
                        updater.losses[counters.micro_batches] = share.detach()
                    else:
                        distribution.backward_of_padding(adapter.module, share, closes=closes)
                else:
                    distribution.backward_of_nothing(adapter.module, closes=closes)
            place.index = index + 1
            if loss is not None:
                for hook in after_backward:
                    hook(trainer, policy)
                    distribution.release()  # after a forward in it: the next one is to find the gradients
                means.add("train/loss", loss, weight)
            for name, value in metrics.items():
                means.add(f"train/{name}", value, weight)
            counters.micro_batches += 1
            counters.batch_in_epoch = index + 1
            if closes:
                run.weight = 1.0  # what is logged of an update counts once
                updater.apply(next_window, run.is_due_at)
            if batch_end:
                run.weight = weight
                outputs = {**metrics, "loss": None if loss is None else loss.detach()}
                for hook in batch_end:
                    hook(trainer, policy, outputs, batch, index)
                run.weight = 1.0
            if closes and run.something_is_due():
                run.at_step()
                if run.done:
                    return
        run.end_epoch()
