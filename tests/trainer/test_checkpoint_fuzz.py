"""Thousands of damaged and hostile checkpoints: each is refused by a message that names the part, or read as it was."""

from __future__ import annotations

import codecs
import os
import random
import re
import resource
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES, MANIFEST, Scene, write
from forgery import FORGERIES
from torch import Tensor, nn
from torch.optim import AdamW
from toys import weights

from policyfit import EMA, FP16, Callback, Checkpoint, CheckpointError, Trainer, WarmupCosine, load
from policyfit.trainer.checkpoint import CheckpointState, read_checkpoint
from policyfit.trainer.newest import newest_checkpoint

pytestmark = pytest.mark.timeout(60)  # a pipe that is waited for, a device that is read to its end

CASES = 130  # of each kind of damage
BEFORE, NEWEST = "000002", "000004"


class Policy(nn.Module):
    """Tied weights and channels_last ones, which the manifest lays out; dropout, so that random streams matter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16))
        self.net[2].weight = self.net[0].weight
        self.register_buffer("unknown", torch.tensor([torch.nan, torch.inf]))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.net(self.conv(batch["x"]).flatten(1))
        return out.float().square().mean()


class Samples:
    """Images of (2, 3, 3)."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(index))}


class Keeper(Callback):
    """Has a state with tensors in it."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.arange(3), "by number": {5: [torch.zeros(2, 2), None]}}


def policy(seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    return Policy()


def a_run(run_dir: Path, seed: int | None = None) -> tuple[Trainer, Policy]:
    trainer = Trainer(
        "cpu", FP16(allow_cpu=True), max_steps=6, batch_size=4, seed=seed, run_dir=run_dir, default_callbacks=False,
        callbacks=[EMA(), Keeper(), Checkpoint(every_steps=2, keep=None, background=False)],
    )  # fmt: skip
    return trainer, policy(seed or 0)


def fit(trainer: Trainer, trained: Policy, resume: Path | str | None = None) -> None:
    trainer.fit(
        trained,
        Samples(),
        optimizer=lambda parameters: AdamW(parameters, lr=1e-2),
        schedule=lambda optimizer: WarmupCosine(optimizer, total_steps=6),
        resume=resume,
    )


@dataclass(frozen=True)
class Whole:
    """Two checkpoints of a run, one of another, what is in them, and how the run ended."""

    files: dict[str, dict[str, bytes]]
    states: dict[str, CheckpointState]
    end: dict[str, Tensor]

    def lay_out(self, root: Path, dice: random.Random) -> Scene:
        """The run and the other one in files, as they were; of what is there already only the damage is mended."""
        checkpoints = root / "run/checkpoints"
        scene = Scene(checkpoints / NEWEST, checkpoints / BEFORE, root / "other" / NEWEST, dice)
        for folder, key in ((scene.folder, NEWEST), (scene.before, BEFORE), (scene.foreign, "other")):
            mend(folder, self.files[key])
        if not (checkpoints / "last").is_symlink():
            (checkpoints / "last").symlink_to(NEWEST)
        return scene


def mend(folder: Path, files: dict[str, bytes]) -> None:
    found = list(folder.rglob("*"))
    plain = {str(p.relative_to(folder)) for p in found if p.is_file() and not p.is_symlink()}
    if plain != set(files) or len(found) != len(files) + 3:
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("pretrained_model", "pretrained_model_ema", "training_state"):
            (folder / name).mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        if not path.exists():
            path.write_bytes(content)
        elif path.stat().st_size != len(content) or path.read_bytes() != content:
            write(path, content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    trainer, trained = a_run(root / "run", seed=7)
    fit(trainer, trained)
    fit(*a_run(root / "other", seed=8))
    folders = {
        BEFORE: root / "run/checkpoints" / BEFORE,
        NEWEST: root / "run/checkpoints" / NEWEST,
        "other": root / "other/checkpoints" / NEWEST,
    }
    files = {
        key: {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for key, folder in folders.items()
    }
    return Whole(files, {key: read_checkpoint(folder) for key, folder in folders.items()}, weights(trained))


def identical(a: Any, b: Any) -> bool:
    """Bit for bit, NaN and the layout in memory included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        layout = [(t.dtype, t.shape, t.stride()) for t in (a, b)]
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return layout[0] == layout[1] and torch.equal(*raw)
    if isinstance(a, CheckpointState):
        return all(identical(getattr(a, f.name), getattr(b, f.name)) for f in fields(a) if f.name != "manifest") and (
            {**a.manifest, "sha256": 0} == {**b.manifest, "sha256": 0}
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(identical, a, b))
    return repr(a) == repr(b)


@contextmanager
def case(kind: str, seed: int) -> Iterator[random.Random]:
    """The dice of one case; a failure says how to repeat it."""
    try:
        yield random.Random(f"{kind} {seed}")
    except BaseException as error:
        error.add_note(f"The damage is {kind!r} with seed {seed}: to repeat it alone, loop over [{seed}].")
        raise


def opened(path: Path, tell: Callable[[str], None], *, verify: bool = True) -> tuple[Path, CheckpointState]:
    """What ``fit`` and ``load`` do first: every byte is verified, and then all is read."""
    folder = newest_checkpoint(path, tell, verify=verify)
    return folder, read_checkpoint(folder, verify=False)


def unexpected(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def assert_named(message: str, hurt: list[str]) -> None:
    """It says which part is damaged: one that was hurt, or one that a hurt manifest speaks of."""
    parts = [name.partition(".")[0].strip() for name in hurt]  # x.json and x.safetensors are read together
    if MANIFEST in hurt:
        parts += ["pretrained_model", "training_state", "written by a newer policyfit"]
    assert any(part in message for part in parts), f"{hurt} is not named: {message}"
    assert len(message) < 1000


_WATCHED = re.compile(r"open|import|exec|compile|(pickle|marshal|ctypes|subprocess|socket|shutil)\..*|"
                      r"os\.(system|exec|fork|spawn|posix_spawn|mkdir|remove|rename|rmdir|link|symlink)")  # fmt: skip
_events: list[tuple[str, str]] = []
_watching = False


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and _WATCHED.fullmatch(event):
        _events.append((event, os.path.normpath(str(arguments[0]))))


@contextmanager
def watched(*folders: Path) -> Iterator[None]:
    """Nothing is imported, executed, unpickled, changed on the disk, or opened outside of ``folders``."""
    global _watching
    _events.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    inside = tuple(f"{folder}/" for folder in folders)
    assert [e for e in _events if e[0] != "open" or not e[1].startswith(inside)] == []
    assert not Path("executed").exists()


@pytest.fixture(scope="module", autouse=True)
def audited() -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        codecs.lookup(encoding)  # which json imports for a file that looks like one in it
    sys.addaudithook(_note)  # for good, as hooks are; it notes nothing outside of watched()


@pytest.fixture
def bounded() -> Iterator[None]:
    """To ask for another gigabyte is a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_newest_is_told_by_its_part_and_the_one_before_used_or_it_is_read_as_it_was(
    whole: Whole, kind: str, tmp_path: Path, bounded: None
) -> None:
    refusals = 0
    for seed in range(CASES):
        with case(kind, seed) as dice:
            scene = whole.lay_out(tmp_path, dice)
            hurt = DAMAGES[kind](scene)
            told: list[str] = []
            path = dice.choice((tmp_path / "run", scene.folder.parent, scene.folder.parent / "last"))
            with watched(scene.folder, scene.before):
                try:
                    folder, state = opened(path, told.append)
                except CheckpointError as error:
                    assert kind == "swap_with_before"  # which hurts both
                    assert_named(str(error).splitlines()[1], hurt)
                    refusals += 1
                else:
                    assert len(told) == (folder == scene.before)
                    assert identical(state, whole.states[folder.name])
            for message in told:
                assert_named(message, hurt)
            refusals += bool(told)
    assert refusals > CASES // 10


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoint_that_is_asked_for_is_refused_and_no_other_used(
    whole: Whole, kind: str, tmp_path: Path, bounded: None
) -> None:
    for seed in range(CASES // 8):
        with case(kind, seed) as dice:
            scene = whole.lay_out(tmp_path, dice)
            hurt = DAMAGES[kind](scene)
            with watched(scene.folder):
                try:
                    folder, state = opened(scene.folder, unexpected)
                except CheckpointError as error:
                    assert_named(str(error), hurt)
                else:
                    assert folder == scene.folder
                    assert identical(state, whole.states[NEWEST])
                with suppress(CheckpointError):  # not another error, though contents may be others
                    opened(scene.folder, unexpected, verify=False)


@pytest.mark.parametrize("kind", FORGERIES)
def test_forged_checkpoint_is_refused_by_name_or_is_a_state_and_nothing_else_happens(
    whole: Whole, kind: str, tmp_path: Path, bounded: None
) -> None:
    for seed in range(CASES * 2 // 3):
        with case(kind, seed) as dice:
            scene = whole.lay_out(tmp_path, dice)
            hurt = FORGERIES[kind](scene)
            with watched(scene.folder):
                try:
                    _, state = opened(scene.folder, unexpected)
                except CheckpointError as error:
                    assert_named(str(error), hurt)
                else:
                    assert kind not in ("forged_name", "forged_special_file")
                    assert type(state) is CheckpointState


@pytest.mark.parametrize("kind", [*DAMAGES, *FORGERIES])
def test_load_of_a_damaged_run_gives_the_weights_of_a_whole_checkpoint_or_refuses(
    whole: Whole, kind: str, tmp_path: Path, bounded: None
) -> None:
    damage = DAMAGES.get(kind) or FORGERIES[kind]
    for seed in range(4):
        with case(kind, seed) as dice, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            scene = whole.lay_out(tmp_path, dice)
            hurt = damage(scene)
            path, average = dice.choice((tmp_path / "run", scene.folder)), dice.random() < 0.5
            try:
                loaded = load(path, device="cpu", precision="no", policy=policy(), weights="ema" if average else "raw")
            except CheckpointError as error:
                if kind not in FORGERIES or not str(error).startswith("The weights in"):  # that do not fit the policy
                    assert_named(str(error), hurt)
            else:
                saved = whole.states[BEFORE if told else NEWEST]
                right = identical(weights(loaded), saved.models["ema"] if average else saved.model)
                assert right or (kind in FORGERIES and MANIFEST not in hurt) or kind == "forged_layout"


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", DAMAGES)
def test_run_resumed_from_a_damaged_checkpoint_is_refused_or_ends_as_it_would_have(
    whole: Whole, kind: str, last: bool, tmp_path: Path
) -> None:
    with case(kind, CASES) as dice:
        scene = whole.lay_out(tmp_path, dice)
        hurt = DAMAGES[kind](scene)
        trainer, trained = a_run(tmp_path / "run")
        try:
            fit(trainer, trained, "last" if last else scene.folder)
        except CheckpointError as error:
            assert not last or kind == "swap_with_before"
            assert_named(str(error).splitlines()[last], hurt)
        else:
            assert identical(weights(trained), whole.end)
            (resumed,) = [note for note in trainer.plan.notes if note.startswith("resumed from")]
            told = [note for note in trainer.plan.notes if "is used instead" in note]
            assert len(told) == (str(scene.before) in resumed)
            for note in told:
                assert_named(note, hurt)
