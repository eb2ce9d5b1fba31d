"""Whole weights on every rank, gradients averaged while backward runs.

``accelerate.Accelerator.prepare_model`` wraps the policy in ``torch.nn.parallel.DistributedDataParallel``, by
``accelerate.DistributedDataParallelKwargs``; it is told ``mixed_precision="no"``, since precision is ours. Buffers are
synchronised once an update (``sync_buffers``) instead of before each forward (``broadcast_buffers=False``).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .device import DeviceStrategy
from .distributed import OF_A_CALLBACK
from .errors import ConfigError, DistributedError, in_words, some
from .foreign import Foreign
from .group import ManyProcesses

T = TypeVar("T")


class DDP(ManyProcesses):
    """``ddp``: every rank holds all weights and sees its own part of each batch.

    Args:
        timeout: Seconds after which a collective that some rank did not join is given up.
        meeting_timeout: The same where ranks meet: in validation, rollouts, saves and hooks of these, where one may be
            at work much longer than the others.
        find_unused_parameters: Look after each forward which parameters it left out, for policies that do not use
            every trainable parameter in every forward; costs a walk through the graph.
    """

    name = "ddp"

    def __init__(
        self, *, timeout: float = 600.0, meeting_timeout: float = 7200.0, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(timeout=timeout, meeting_timeout=meeting_timeout)
        if not isinstance(find_unused_parameters, bool):
            raise ConfigError(f"DDP.find_unused_parameters must be true or false, got {find_unused_parameters!r}.")
        self.find_unused_parameters = find_unused_parameters
        self._trainable: list[tuple[str, nn.Parameter]] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._has_summed = False  # whether the micro-batch that failed has made its sums
        self._sums = 0  # collectives of the backward that closes a window
        self._is_stuck = False  # whether torch's wrapper may wait for the end of a backward that was left by an error

    @property
    def options(self) -> dict[str, Any]:
        """With how unused parameters are met."""
        return {**super().options, "find_unused_parameters": self.find_unused_parameters}

    def _join(self, device: DeviceStrategy, backend: str) -> None:
        super()._join(device, backend)
        self._foreign = Foreign(device.device)

    def _wrap(self, policy: nn.Module) -> nn.Module:
        """Torch's wrapper around the policy, which sends rank 0's weights and buffers to all.

        A backward of zeros is made first, and the buckets are laid out anew from it, as torch otherwise does before
        the second forward. A resumed run would do that at another step, and so round sums over three or more ranks
        otherwise; and ranks talk while they do it, which one that fails before that forward would miss. By another
        such backward it is known how many sums an update makes.
        """
        from accelerate import Accelerator, DistributedDataParallelKwargs  # type: ignore[import-untyped]

        self._has_summed = self._is_stuck = False
        self._trainable = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in policy.named_parameters() if not p.requires_grad]
        self._door = _Door(policy, self._device if self.find_unused_parameters else None)
        options = DistributedDataParallelKwargs(
            broadcast_buffers=False,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,  # the update drops gradients by None, which that allows
        )
        try:
            accelerator = Accelerator(
                mixed_precision="no", cpu=self._device.type == "cpu", kwargs_handlers=[options], device_placement=False
            )
        except ValueError as error:
            raise DistributedError(
                f"accelerate was already set up in this process with other settings: {error}\n"
                "Make no Accelerator before fit; the Trainer makes what it needs."
            ) from error
        with warnings.catch_warnings():
            # torch 2.13 has a new name for broadcast_buffers, which accelerate does not know.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped: nn.Module = accelerator.prepare_model(self._door)
        self._take_from_rank_0(policy.buffers())
        self._foreign.found = any(isinstance(module, nn.SyncBatchNorm) for module in policy.modules())
        with warnings.catch_warnings(action="ignore"):  # of zeros no parameter is left out, as torch says once
            self._backward_of_zero(wrapped, self._trained())
            wrapped.reducer._rebuild_buckets()  # type: ignore[operator, union-attr]
            self._foreign.begin()
            self._backward_of_zero(wrapped, self._trained())
        self._sums = self._foreign.made()
        self._foreign.begin()
        policy.zero_grad()
        return wrapped

    def through(self, module: nn.Module, step: Callable[..., T]) -> Callable[..., T]:
        """The step behind torch's wrapper, whose own forward is what makes gradients meet."""
        return partial(module, policyfit_step=step)

    def micro_batch(self, module: nn.Module, *, closes: bool) -> AbstractContextManager[Any]:
        """Gradients stay on their rank until the backward that closes the window sends their sum.

        Raises:
            ConfigError: That left out a trainable parameter, or one has thawed since, so that ranks would part.
        """
        return self._closing(module) if closes else module.no_sync()  # type: ignore[operator]

    @contextmanager
    def _closing(self, module: Any) -> Iterator[None]:
        yield
        try:
            module._check_reducer_finalized()
        except RuntimeError as error:
            if not _is_unfinished(error):
                raise
            named = dict(self._door.policy.named_parameters())
            if replaced := [name for name, parameter in self._trainable if named.get(name) is not parameter]:
                raise ConfigError(
                    f"These parameters have been replaced since the run began, by others that no optimizer moves: "
                    f"{some(replaced)}.\nFill them in place (parameter.data.copy_(new))."
                ) from error
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            names = [self._trainable[int(index)][0] for index in found[1].split()] if found else []
            raise ConfigError(
                "These trainable parameters got no gradient, so the ranks' gradients were not averaged: "
                f"{some(names) or 'unknown'}.\nUse them in the loss, freeze them before fit, or use "
                "DDP(find_unused_parameters=True)."
            ) from error
        thawed = [name for name, p in self._frozen if p.grad is not None]
        if thawed:
            self._has_summed = True
            raise ConfigError(
                "These parameters were frozen when the run began and have thawed since, but DDP averages the gradients "
                f"only of what could be trained then: {some(thawed)}.\nBegin with all that is ever trained thawed, "
                "with DDP(find_unused_parameters=True), and freeze it in on_fit_start and on_train_epoch_start; or use "
                "distributed='fsdp'."
            )

    def backward_of_nothing(self, module: nn.Module, *, closes: bool) -> None:
        """A forward whose loss is zero times every parameter, and its backward, where the window closes.

        With ``find_unused_parameters`` it is zero times a parameter that is nobody's: torch gives zeros to what any
        rank uses, and what none uses is to have no gradient.
        """
        if closes:
            self._backward_of_zero(module, list(self._door.nobodys) or self._trained())

    def stand_in(self, module: nn.Module, *, closes: bool) -> None:
        """The sums alone, of zeros; where a backward was left by an error, those that it has not come to.

        Takes the memory of all gradients.
        """
        if not (self._has_summed or self._is_stuck) and _has_ended(module):
            self._foreign.look(0)  # those of the window in which it failed
        self._check_can_stand_in()
        if self._has_summed:
            self._has_summed = False
        elif closes and (self._is_stuck or _has_ended(module)):
            self._sum_nothing(module)
        elif closes:
            self._finish_backward()
            self._is_stuck = True

    def _sum_nothing(self, module: Any) -> None:
        """As torch's wrapper does for a rank whose data has ended (``join``); no user code runs."""
        module._match_all_reduce_for_bwd_pass()
        if self.find_unused_parameters:
            module._match_unused_params_allreduce()

    def _finish_backward(self) -> None:
        """Give a gradient of zero to each parameter that had none; torch tells by an error alone which had one."""
        trained = self._trained()
        # Gradients may have been left off; and what this rank has frozen since has a part in the others' sums.
        with torch.inference_mode(False), torch.enable_grad(), _thawed(trained), _without_hooks(trained):
            for parameter in trained:
                gradient, parameter.grad = parameter.grad, None
                try:
                    _nothing(parameter).backward()  # type: ignore[no-untyped-call]
                except RuntimeError as said:
                    if "mark a variable ready only once" not in in_words(said):
                        raise
                    parameter.grad = gradient  # torch refuses in the end one that is no view of its bucket

    def reduce_max(self, flags: Tensor) -> None:
        """One all-reduce; by now every sum of the window is made, and no more than these by the run itself."""
        if not self._aborts:  # else this rank has made what it could
            self._foreign.look(self._sums)
        super().reduce_max(flags)
        self._foreign.begin()

    def sync_buffers(self, *, failed: bool = False) -> None:
        """One broadcast for each type of buffer; none without buffers."""
        with self._foreign.besides():
            super().sync_buffers(failed=failed)

    def gather(self, value: T, place: str = OF_A_CALLBACK) -> list[T]:
        """Every rank's value on every rank; waits. What was made where ranks meet is in nobody's way."""
        values = super().gather(value, place)
        if not self._is_alone:
            self._foreign.begin()
        return values

    def _place(self) -> int:
        return self._foreign.count()

    def stay_alone(self) -> bool:
        """It has all weights; of several that have failed the first to say so keeps them."""
        self._is_alone = self._spoke_first
        return self._is_alone

    def _check_can_stand_in(self) -> None:
        """Refuse where others than the run talk, unless all ranks have failed, and at the same place of that.

        Raises:
            DistributedError: A SyncBatchNorm or user code may wait in a collective that this rank cannot make.
        """
        assert self._roll_call is not None
        if self._foreign.found and not self._roll_call.all_have_left():
            raise DistributedError(
                "The policy or a callback talks to the other ranks by itself, by a SyncBatchNorm or a collective of "
                "its own code, in which no rank can be stood in for, so that they lose this one."
            )

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._trainable]

    def _backward_of_zero(self, module: nn.Module, of: list[nn.Parameter]) -> None:
        with _without_hooks(self._trained()):
            module(policyfit_step=lambda: torch.stack([_nothing(p) for p in of]).sum()).backward()


class _Door(nn.Module):
    """Lets torch's wrapper, which calls ``forward`` only, call any function that runs the policy."""

    def __init__(self, policy: nn.Module, nobodys_on: torch.device | None) -> None:
        super().__init__()
        self.policy = policy
        # Behind the policy's, by whose numbers torch says which got no gradient. No optimizer moves it.
        self.nobodys = nn.ParameterList([] if nobodys_on is None else [torch.zeros(1, device=nobodys_on)])

    def forward(self, *arguments: Any, policyfit_step: Callable[..., Any] | None = None, **named: Any) -> Any:
        """That function, or the policy's forward."""
        return (self.policy if policyfit_step is None else policyfit_step)(*arguments, **named)


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Zeros that nobody computed are not for a user's hooks, one of which may be what failed."""
    hooks = [found for p in parameters for found in (p._backward_hooks, p._post_accumulate_grad_hooks) if found]
    kept = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    try:
        yield
    finally:
        for found, before in zip(hooks, kept, strict=True):
            found.update(before)


@contextmanager
def _thawed(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _nothing(parameter: Tensor) -> Tensor:
    return parameter.reshape(-1)[:1].sum() * 0.0


def _has_ended(module: Any) -> bool:
    """Whether no backward that sums was left in its middle."""
    try:
        module._check_reducer_finalized()
    except RuntimeError:  # in words of their own where all sums had begun, so ``_is_unfinished`` does not know them
        return False
    return True


def _is_unfinished(error: BaseException) -> bool:
    said = "Expected to have finished reduction in the prior iteration"
    return isinstance(error, RuntimeError) and said in in_words(error)
