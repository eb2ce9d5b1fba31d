"""Every moment of a run at which a callback can act, in the order in which they come.

    setup                                      device, precision and optimizers are in place, nothing has run
    on_load_checkpoint                         only when resuming; load_state_dict came before setup
    on_fit_start                               when resuming, what hooks froze or thawed later is so again after it
    for each epoch:
        on_train_epoch_start                   not again when a run is resumed inside the epoch
        for each micro-batch:
            on_train_batch_start
            forward, in the precision
            on_before_backward
            backward
            on_after_backward
            if it closes a window:             the update is applied
                the update before it is settled -> on_update_end
                gradients are unscaled and checked
                on_before_optimizer_step       once an optimizer: gradients unscaled, not yet clipped
                clip, step every optimizer or none, move the loss scale
                on_before_zero_grad            once an optimizer
                gradients are dropped
            on_train_batch_end
            if something is due at this step:  the update is settled now
                on_update_end
                on_log                         every log_every steps
                on_validation_start, on_validation_batch_start, on_validation_batch_end, on_validation_end
                on_due                         for each callback that answers due(step) with True; Checkpoint last
        the last update is settled -> on_update_end
        on_train_epoch_end
    on_fit_end                                 it completed or was stopped, or ranks failed and save what all have
    on_exception                               with the exception: instead of on_fit_end, or after it in that case
    teardown                                   always, last

``on_save_checkpoint`` comes inside ``trainer.save_checkpoint()``; ``on_rollout_start`` and ``on_rollout_end``
inside ``trainer.evaluate()``. ``on_log`` comes also for events (a skip, a new loss scale), at once. Every validation
and every rollout runs inside the contexts that ``around_evaluation`` gives.

Callbacks run in list order at every hook. Hooks that nobody overrides are dropped once, up front, and cost
nothing. Names and arguments are Lightning's where Lightning has the hook.
"""

HOOKS: tuple[str, ...] = (
    "setup",
    "on_load_checkpoint",
    "on_fit_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_update_end",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_log",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_due",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_rollout_start",
    "on_rollout_end",
    "on_fit_end",
    "on_exception",
    "teardown",
)
