"""What the run files of the tests name: ``run_parts.Policy``, ``run_parts.Data``, ``run_parts.Env``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from policyfit import Callback
from policyfit.trainer.cli import main

BASE = """\
policy: {class_path: run_parts.Policy}
data: {train: run_parts.Data}
trainer: {device: cpu, max_steps: 2, seed: 3}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}
eval: {env: run_parts.Env, episodes: 1}
"""


class Policy(nn.Module):
    def __init__(
        self,
        width: int = 4,
        mode: Literal["plain", "fast"] = "plain",
        shift: bool = False,
        sizes: tuple[int, ...] = (1, 2),
        names: list[str] | None = None,
        options: dict[str, float] | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be positive, got {width}")
        self.sizes, self.names = sizes, names
        self.layer = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layer(batch) - 1).square().mean()
        return loss

    def select_action(self, observation: Tensor) -> Tensor:
        found: Tensor = self.layer(observation)
        return found


class Placed(Policy):
    """Has a device of its own."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()


class Marked(Policy):
    """Marks its parameters, as for an optimizer that treats some of them otherwise."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.marked = True  # type: ignore[attr-defined]


class Whole(Policy):
    """Lightning's dialect: brings its data and its optimizer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        return loss

    def train_dataloader(self) -> torch.utils.data.DataLoader[Tensor]:
        return torch.utils.data.DataLoader(Data(), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


T = TypeVar("T")


class Scale(Generic[T]):
    """Something that is generic over what it scales."""


class Half(Scale[int]):
    """What a run names where a ``Scale`` is wanted."""


@dataclass
class Options:
    depth: int = 1


class Takes(Policy):
    """Takes an argument of each kind."""

    def __init__(  # type: ignore[no-untyped-def]
        self,
        scale: Scale[int] | None = None,
        scales: list[Scale[int]] | None = None,
        make: Callable[[int], Scale[int]] | None = None,
        options: Options | None = None,
        own: Options = Options(),  # noqa: B008
        norm: nn.Module | None = None,
        anything: Any = None,
        untyped=None,
        things: object = None,
    ) -> None:
        super().__init__()
        self.given = {key: value for key, value in locals().items() if key not in ("self", "__class__")}


class Unannotated(Callback):
    def __init__(self, kind, *, at=2) -> None:  # type: ignore[no-untyped-def]
        self.kind, self.at = kind, at


class Mute(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


class Leaves(Policy):
    """Ends the program, as a script does that checks its arguments."""

    def __init__(self, code: int = 0) -> None:
        raise SystemExit(code)


class Logger:
    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def finalize(self, status: str) -> None: ...


class Own(torch.optim.SGD):
    """Looks at its parameters, writes into them and draws: a run starts from what that leaves."""

    def __init__(self, params: Any, lr: float = 0.1, writes: bool = False, needs: str = "") -> None:
        if lr < 0.01:
            raise ValueError(f"lr must be at least 0.01, got {lr}")
        params = list(params)
        if not all(hasattr(p, needs) for p in params if needs):
            raise ValueError(f"no parameter has {needs}")
        if any(p.sum().isnan() for p in params):
            raise ValueError("a parameter is not finite")
        super().__init__(params, lr)
        for p in params if writes else ():
            p.data.add_(torch.rand_like(p))


def own(params: Any, lr: float) -> Own:
    return Own(params, lr)


def no_optimizer(params: Any) -> list[Any]:
    return list(params)


class Steep(torch.optim.lr_scheduler.LRScheduler):
    """Of one's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, steepness: int = 1) -> None:
        self.steepness = 1 // steepness
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch and self.steepness < 0:
            raise ValueError("too steep")
        return [float(rate) for rate in self.base_lrs]


def half(step: int) -> float:
    return 0.5


class Data(torch.utils.data.Dataset[Tensor]):
    def __init__(self, size: int = 16) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(2) * index / self.size


class Recorded(Data):
    """Is recorded at length."""

    def __init__(self, size: int = 16) -> None:
        raise RuntimeError("the data was made")


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.ones(2)] * 8)


class Env:
    """Never made by a plan."""

    def __init__(self) -> None:
        raise RuntimeError("the environment was made")

    def reset(self, *, seed: int | None = None) -> None: ...

    def step(self, action: Any) -> None: ...


class Said(NamedTuple):
    """What a command did: its exit code, what it printed, and its errors and notes as prose on one line."""

    code: int
    out: str
    err: str


def policyfit(*words: str) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return Said(
        code, out.getvalue(), " ".join(" ".join(line.strip("│╭╮╰╯─ ") for line in err.getvalue().splitlines()).split())
    )


def layer(key: str, text: str) -> str:
    """YAML that says one dotted key, each part of it on a line of its own."""
    *outer, last = key.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(outer)]
    return "\n".join([*lines, f"{'  ' * len(outer)}{last}: {text}", ""])


def write(files: dict[str, str]) -> Sequence[Path]:
    """Write files into the current folder."""
    for name, text in files.items():
        Path(name).write_text(text)
    return [Path(name) for name in files]
