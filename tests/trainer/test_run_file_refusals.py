"""Run files and command lines that cannot be meant: each is refused by key, value and place before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from run_parts import BASE, Data, Marked, Own, layer, policyfit

from policyfit import Trainer, load
from policyfit.trainer.rng import seed_everything

#: A dotted key, what is written there, and what the refusal says of it: the key, the value, and the nearest valid key.
BAD: list[tuple[str, str, str]] = [
    # words that readers of YAML read in two ways
    ("trainer.max_steps", "010", "010 could be text or a number with leading zeros"),
    ("trainer.max_steps", "0o17", "0o17 could be text or a number that is not decimal"),
    ("trainer.max_steps", "0x10", "0x10 could be text or a number that is not decimal"),
    ("trainer.max_steps", "0b11", "0b11 could be text or a number that is not decimal"),
    ("trainer.max_steps", "1_000", "1_000 could be text or a number with underscores"),
    ("trainer.seed", "-007", "-007 could be text or a number with leading zeros"),
    ("trainer.clip_norm", "01.5", "01.5 could be text or a number with leading zeros"),
    ("trainer.clip_norm", "inf", 'inf could be text or a number. Write "inf" in quotes for the text, or .inf or'),
    (
        "trainer.run_dir",
        "2024-01-31",
        '2024-01-31 could be text or a date. Write "2024-01-31" in quotes for the text.',
    ),
    ("trainer.run_dir", "2024-01-31 10:00:00", "2024-01-31 10:00:00 could be text or a date"),
    ("trainer.run_dir", "1:30", "1:30 could be text or a time, or a number to the base 60"),
    ("trainer.run_dir", "190:20:30", "190:20:30 could be text or a time, or a number to the base 60"),
    ("policy.init_args.names", "NaN", 'NaN could be text or a number. Write "NaN" in quotes for the text, or .nan'),
    ("optimizer.init_args.lr", "1_0e-4", "1_0e-4 could be text or a number with underscores"),
    ("optimizer.init_args.lr", "1e999", "1e999 is too large for a floating-point number."),
    # the environment by another spelling than the explicit one
    (
        "trainer.seed",
        "${env:RUN_UNSET}",
        "${env:RUN_UNSET} needs the environment variable RUN_UNSET, which is not set.",
    ),
    ("trainer.seed", "${env:RUN_EMPTY}", "needs the environment variable RUN_EMPTY, which is empty. Set it, or give a"),
    ("trainer.seed", "${env:RUN_OCTAL}", "${env:RUN_OCTAL} is 010: 010 could be text or a number with leading zeros"),
    ("trainer.run_dir", "${HOME}/runs", "${HOME} names no variable of the environment. Write ${env:HOME}"),
    ("trainer.run_dir", "${oc.env:HOME}", "${oc.env:HOME} names no variable of the environment. Write ${env:HOME}"),
    ("trainer.run_dir", "${env:1X}", "${env:1X} names no variable of the environment. Write ${env:NAME}"),
    ("trainer.run_dir", "${env:X", "${env:X names no variable of the environment. Write ${env:X}"),
    # wrong types
    (
        "trainer.precision",
        "1e-4",
        "precision must be no, bf16, fp16 or auto, or a precision strategy, got '0.0001'. Use",
    ),
    ("trainer.max_steps", "ten", "trainer.max_steps must be int or null, got 'ten'."),
    ("trainer.max_steps", "1.5", "trainer.max_steps must be int or null, got 1.5."),
    ("trainer.max_steps", "true", "trainer.max_steps must be int or null, got True."),
    ("trainer.max_steps", "yes", "trainer.max_steps must be int or null, got 'yes'."),
    ("trainer.max_steps", "[1]", "trainer.max_steps must be int or null, got [1]."),
    ("trainer.max_steps", "{a: 1}", "trainer.max_steps must be int or null, got {'a': 1}."),
    ("trainer.max_steps", '"8"', "trainer.max_steps must be int or null, got '8'. Write it without quotes if you mean"),
    ("trainer.max_steps", '"010"', "trainer.max_steps must be int or null, got '010'."),
    ("trainer.max_steps", "None", "trainer.max_steps must be int or null, got 'None'. Write null, as None is Python's"),
    ("trainer.workers", '"2"', "trainer.workers must be int or 'auto', got '2'. Write it without quotes if you mean"),
    ("trainer.tf32", '"null"', "trainer.tf32 must be bool or null, got 'null'. Write null for none."),
    ("trainer.clip_norm", "off", "trainer.clip_norm must be float or null, got 'off'. Write null for none."),
    ("trainer.clip_norm", "false", "trainer.clip_norm must be float or null, got False. Write null for none."),
    ("trainer.val_every", "no", "trainer.val_every must be int or null, got 'no'. Write null for none."),
    ("trainer.run_dir", '""', "trainer.run_dir must be a folder, got ''. Use null for a new one under runs/."),
    ("trainer.run_dir", "None", "trainer.run_dir must be str or Path or null, got 'None'. Write null"),
    ("trainer.run_dir", "3", "trainer.run_dir must be str or Path or null, got 3. Write it in quotes if you mean the"),
    ("trainer.tf32", "maybe", "trainer.tf32 must be bool or null, got 'maybe'."),
    ("trainer.deterministic", "2", "trainer.deterministic must be bool, got 2."),
    ("trainer.compile", "oui", "trainer.compile must be bool, got 'oui'."),
    ("trainer.seed", "1.5", "trainer.seed must be int or null, got 1.5."),
    ("trainer.workers", "atuo", "trainer.workers must be int or 'auto', got 'atuo'. Did you mean 'auto'?"),
    ("trainer.clip_norm", "high", "trainer.clip_norm must be float or null, got 'high'."),
    ("trainer.clip_norm", "true", "trainer.clip_norm must be float or null, got True."),
    ("trainer.non_finite", "skp", "trainer.non_finite must be 'skip' or 'raise' or 'off', got 'skp'. Did you mean"),
    ("trainer.non_finite", "no", "trainer.non_finite must be 'skip' or 'raise' or 'off', got 'no'."),
    ("trainer.callbacks", "{}", "trainer.callbacks must be a list, got {}."),
    (
        "trainer.callbacks",
        "EMA",
        "trainer.callbacks must be a list, got 'EMA'. Put a single one in a list, too, or",
    ),
    ("trainer.callbacks", "{class_path: policyfit.EMA}", "trainer.callbacks must be a list, got {'class_path'"),
    ("trainer.callbacks+", "3", "trainer.callbacks[0] must name a Callback, got 3."),
    ("trainer.callbacks+", "null", "trainer.callbacks+ appends nothing, got null."),
    ("trainer.loggers", "3", "trainer.loggers must be a list, got 3."),
    ("trainer.grad_scaler", "3", "trainer.grad_scaler must be GradScalerConfig or Mapping[str, Any] or null, got 3."),
    ("trainer.grad_scaler.init_scale", "big", "trainer.grad_scaler.init_scale must be float, got 'big'."),
    ("trainer.device", "0", "trainer.device must be str or DeviceStrategy, got 0. Write it in quotes"),
    (
        "trainer.device",
        "gpu",
        "device must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, or a device strategy, got 'gpu'.",
    ),
    ("trainer.device", "cuda:99", "device='cuda:99' was requested, but"),
    ("trainer.precision", "16", "precision must be no, bf16, fp16 or auto, or a precision strategy, got '16'. Use"),
    ("trainer.precision", "bf61", "or a precision strategy, got 'bf61'. Use precision='bf16'."),
    ("trainer.distributed", "dp", "distributed must be auto, none, ddp or fsdp, or a distribution strategy, got 'dp'."),
    ("trainer", "3", "trainer must be a mapping of keys to values, got 3."),
    ("data", "run_parts.Data", "data must be a mapping of keys to values, got 'run_parts.Data'."),
    ("policy.init_args", "[3]", "policy.init_args must map argument names to values, got [3]."),
    ("policy.init_args.width", "wide", "policy.init_args.width must be int, got 'wide'."),
    ("policy.init_args.width+", "3", "policy.init_args.width+ appends to a list, but there is none yet."),
    (
        "policy.init_args.mode",
        "fats",
        "policy.init_args.mode must be 'plain' or 'fast', got 'fats'. Did you mean 'fast'?",
    ),
    ("policy.init_args.shift", "maybe", "policy.init_args.shift must be bool, got 'maybe'."),
    ("policy.init_args.sizes", "3", "policy.init_args.sizes must be tuple[int, ...], got 3."),
    ("policy.init_args.names", "x", "policy.init_args.names must be list[str] or null, got 'x'."),
    ("policy.init_args.head", "torch.optim.SGD", "policy.init_args.head must be a Module, but torch.optim.sgd.SGD is"),
    ("optimizer.init_args.lr", "fast", "optimizer.init_args.lr must be float or Tensor, got 'fast'."),
    (
        "optimizer.init_args.betas",
        "[0.9]",
        "optimizer.init_args.betas must be tuple[float | Tensor, float | Tensor], got",
    ),
    # out of range
    ("trainer.batch_size", "0", "trainer.batch_size must be a whole number of at least 1, got 0."),
    (
        "trainer.max_steps",
        "0",
        "trainer.max_steps must be a whole number of at least 1, got 0. Use null for no limit of",
    ),
    ("trainer.accumulate", "-1", "trainer.accumulate must be a whole number of at least 1, got -1."),
    ("trainer.workers", "-1", "trainer.workers must be a whole number of at least 0, got -1."),
    ("trainer.clip_norm", "0", "trainer.clip_norm must be a finite number above 0, got 0. Use null for no limit."),
    ("trainer.clip_norm", ".inf", "trainer.clip_norm must be a finite number above 0, got inf."),
    ("trainer.max_skips", "0", "trainer.max_skips must be a whole number of at least 1, got 0."),
    ("trainer.seed", "-1", "trainer.seed must be a whole number from 0 to 2**63 - 1, got -1."),
    ("trainer.val_every", "-5", "trainer.val_every must be a whole number of at least 1, got -5. Use null to validate"),
    ("eval.episodes", "0", "eval.episodes must be a whole number of at least 1, got 0."),
    (
        "policy.init_args.width",
        "0",
        "policy: making run_parts.Policy failed: ValueError: width must be positive, got 0",
    ),
    ("optimizer.init_args.lr", "-1", "ValueError: Invalid learning rate: -1.0 Correct optimizer.init_args.lr."),
    ("optimizer.init_args.betas", "[0.9, 1.5]", "parameter at index 1: 1.5 Correct optimizer.init_args.betas."),
    # keys that exclude each other
    ("trainer.grad_scaler", "{init_scale: 3}", "grad_scaler sets the loss scale of precision='fp16', but precision is"),
    # unknown keys
    ("trainer.max_step", "3", "trainer.max_step is not a valid key. Did you mean trainer.max_steps?"),
    ("trainer.num-epochs", "3", "trainer.num-epochs is not a valid key. Did you mean trainer.max_epochs?"),
    ("trainer.Precision", "no", "trainer.Precision is not a valid key. Did you mean trainer.precision?"),
    ("trainer.acumulate", "2", "trainer.acumulate is not a valid key. Did you mean trainer.accumulate?"),
    ("trainer.callback", "null", "trainer.callback is not a valid key. Did you mean trainer.callbacks?"),
    ("trainer.grad_scaler.growth", "3", "Did you mean trainer.grad_scaler.growth_factor?"),
    ("policy.init_args.widht", "3", "policy.init_args.widht is not a valid key. Did you mean policy.init_args.width?"),
    (
        "optimizer.init_args.lrr",
        "3",
        "optimizer.init_args.lrr is not a valid key. Did you mean optimizer.init_args.lr?",
    ),
    ("trainer.calbacks+", "[x]", "trainer.calbacks+ is not a valid key. Did you mean trainer.callbacks+?"),
    ("trainer.callbacks++", "x", "trainer.callbacks++ is not a valid key. Did you mean trainer.callbacks+?"),
    ("trainer.callbacks +", "x", "trainer.callbacks + is not a valid key. Did you mean trainer.callbacks+?"),
    ("trainer.bogus+", "x", "trainer.bogus+ is not a valid key. Valid here: device, precision,"),
    ("trainer.+", "x", "trainer.+ is not a valid key. Valid here: device, precision,"),
    ("trainer.bogus", "x", "trainer.bogus is not a valid key. Valid here: device, precision,"),
    ("callbacks+", "x", "callbacks+ is not a valid key. Did you mean trainer.callbacks+?"),
    ("calbacks+", "x", "calbacks+ is not a valid key. Did you mean trainer.callbacks+?"),
    ("data.trian", "run_parts.Data", "data.trian is not a valid key. Did you mean data.train?"),
    ("eval.episode", "3", "eval.episode is not a valid key. Did you mean eval.episodes?"),
    ("evl", "{}", "evl is not a valid key. Did you mean eval?"),
    ("evl", "null", "evl is not a valid key. Did you mean eval?"),
    ("max_steps", "3", "max_steps is not a valid key. Did you mean trainer.max_steps?"),
    ("schedule", "{}", "schedule must name a torch.optim.lr_scheduler.LRScheduler, got {}."),
    # classes
    ("policy", "run_parts.Polcy", "policy.class_path: run_parts holds no Polcy. Did you mean Policy?"),
    ("policy", "run_parts.Data", "policy must be a torch.nn.Module, but run_parts.Data is not one."),
    (
        "policy",
        "no_parts.Policy",
        "policy.class_path: there is no module no_parts, neither installed nor beside the run",
    ),
    ("schedule", "WarmupCosin", "torch.optim.AdamW is, got 'WarmupCosin'. Did you mean WarmupCosine?"),
    ("trainer.precision.class_path", "FP61", "torch.optim.AdamW is, got 'FP61'. Did you mean FP16?"),
    ("policy", "Policy", "policy.class_path must be written module.Class, as torch.optim.AdamW is, got 'Policy'."),
    ("policy.class_path", "3", "policy.class_path must be written module.Class, as torch.optim.AdamW is, got 3."),
    (
        "optimizer",
        "torch.nn.Linear",
        "optimizer must be a torch.optim.Optimizer, but torch.nn.modules.linear.Linear is",
    ),
    ("optimizer", "torch.optim.Adm", "optimizer.class_path: torch.optim holds no Adm. Did you mean Adam?"),
    ("schedule", "torch.optim.SGD", "schedule must be a torch.optim.lr_scheduler.LRScheduler, but torch.optim.sgd.SGD"),
    ("data.train", "run_parts.Policy", "data.train must be data with __getitem__ or __iter__, but run_parts.Policy is"),
    ("eval.env", "run_parts.Data", "eval.env must be a gymnasium environment, or something that makes one when called"),
    # words of other tools that mean something else here
    (
        "trainer.devices",
        "2",
        "trainer.devices is Lightning's and means something else here, got 2. Write nothing, and start a",
    ),
    (
        "trainer.num_nodes",
        "2",
        "got 2. Write nothing, and start a process for each device: torchrun --nproc-per-node=N",
    ),
    ("trainer.check_val_every_n_epoch", "1", "got 1. Write trainer.val_every: N, which counts steps; left out, it is"),
    ("save_freq", "10", "save_freq is LeRobot's and means something else here, got 10. Write trainer.callbacks:"),
    ("lr_scheduler", "{}", "lr_scheduler is Lightning's and means something else here, got {}. Write schedule:"),
    (
        "dataset",
        "{repo_id: a/b}",
        "dataset is LeRobot's and means something else here, got {'repo_id': 'a/b'}. Write data.",
    ),
]

#: Of these the place is that of the value, and on the command line the option is named.
READ_IN_TWO_WAYS = ("could be text", "is too large", "environment variable", "of the environment")

#: Mistakes inside a value: where in the value, and what is said.
INSIDE: list[tuple[str, str, int, str]] = [
    ("policy.init_args.sizes", "[1, a]", 4, "policy.init_args.sizes[1] must be int, got 'a'."),
    (
        "policy.init_args.sizes",
        '[1, "2"]',
        4,
        "policy.init_args.sizes[1] must be int, got '2'. Write it without quotes",
    ),
    ("policy.init_args.options", "{a: 1, b: x}", 7, "policy.init_args.options.b must be float, got 'x'."),
    ("trainer.callbacks", "[policyfit.EMA, 3]", 16, "trainer.callbacks[1] must name a Callback, got 3."),
    ("trainer.callbacks", "[EMA, null]", 6, "trainer.callbacks[1] must name a Callback, got None. Write {class_path:"),
    ("trainer.callbacks", "[EMA, Nonsense]", 6, "trainer.callbacks[1] must name a Callback, got 'Nonsense'. Write"),
    ("trainer.callbacks", "[Checkpont]", 1, "must name a Callback, got 'Checkpont'. Did you mean Checkpoint?"),
    ("trainer.callbacks", "[{classpath: EMA}]", 2, "Did you mean trainer.callbacks[0].class_path?"),
    ("trainer.callbacks", "[torch.nn.ReLU]", 1, "trainer.callbacks[0] must be a Callback, but torch.nn.modules"),
    ("trainer.callbacks", "[policyfit.Checkpont]", 1, "policyfit holds no Checkpont. Did you mean Checkpoint?"),
    (
        "trainer.callbacks",
        "[{class_path: policyfit.EMA, args: {}}]",
        29,
        "trainer.callbacks[0].args is not a valid key.",
    ),
    (
        "trainer.callbacks",
        "[{class_path: policyfit.EMA, init_args: {deca: 0.5}}]",
        41,
        "trainer.callbacks[0].init_args.deca is not a valid key. Did you mean trainer.callbacks[0].init_args.decay?",
    ),
    (
        "trainer.callbacks+",
        "[{class_path: policyfit.EMA, init_args: {decay: 2}}]",
        41,
        "trainer.callbacks[0]: EMA.decay must be a finite number above 0 and below 1, got 2.0.",
    ),
    (
        "trainer.precision",
        "{class_path: policyfit.FP16, init_args: {allow_cpu: true, grad_scaler: {growth_factor: 1}}}",
        72,
        "grad_scaler.growth_factor must be a finite number above 1, got 1.0.",
    ),
    ("trainer", "{callbacks: [], callbacks+: []}", 16, "trainer.callbacks+ and trainer.callbacks exclude each other"),
]


@pytest.fixture(autouse=True)
def _base_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_UNSET", raising=False)
    monkeypatch.setenv("RUN_EMPTY", "")
    monkeypatch.setenv("RUN_OCTAL", "010")
    Path("base.yaml").write_text(BASE)


def _assert_refused(words: list[str], *fragments: str) -> None:
    said = policyfit(*words)
    assert said.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    for fragment in fragments:
        assert fragment in said.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(("key", "text", "fragment"), BAD, ids=[f"{key}={text}" for key, text, _ in BAD])
def test_what_cannot_be_meant_is_refused_in_a_file_and_on_the_command_line(key: str, text: str, fragment: str) -> None:
    Path("lab.yaml").write_text(layer(key, text))
    parts = key.split(".")
    line, column = len(parts), 2 * len(parts) - 1
    of_value = any(words in fragment for words in READ_IN_TWO_WAYS)
    place = f"lab.yaml:{line}:{column + (len(parts[-1]) + 2 if of_value else 0)}: {f'{key}: ' if of_value else ''}"
    _assert_refused(["plan", "base.yaml", "lab.yaml"], f"{place}", fragment)
    on_the_line = f"--{key}={text}: " if of_value else "command line: "
    _assert_refused(["plan", "base.yaml", f"--{key}={text}"], on_the_line, fragment)


@pytest.mark.parametrize(("key", "text", "offset", "fragment"), INSIDE, ids=[f"{k}={t}" for k, t, *_ in INSIDE])
def test_a_mistake_inside_a_value_is_found_there(key: str, text: str, offset: int, fragment: str) -> None:
    Path("lab.yaml").write_text(layer(key, text))
    parts = key.split(".")
    column = 2 * len(parts) - 1 + len(parts[-1]) + 2 + offset
    _assert_refused(["plan", "base.yaml", "lab.yaml"], f"lab.yaml:{len(parts)}:{column}: ", fragment)
    _assert_refused(["plan", "base.yaml", f"--{key}={text}"], "command line: ", fragment)


def test_a_misspelt_class_path_is_named_as_any_key_is() -> None:
    Path("lab.yaml").write_text("policy: {classpath: run_parts.Policy, init_args: {width: 3}}\n")
    _assert_refused(["plan", "lab.yaml"], "lab.yaml:1:10: policy.classpath is not a valid key. Did you mean policy.")


def test_two_callbacks_of_one_name_are_placed_where_the_second_is() -> None:
    Path("base.yaml").write_text(BASE.replace("seed: 3", "seed: 3, callbacks: [EMA]"))
    _assert_refused(["plan", "base.yaml", "--trainer.callbacks+=EMA"], "command line: Two callbacks of this run keep")
    Path("lab.yaml").write_text("trainer:\n  callbacks+:\n    - EMA\n")
    _assert_refused(["plan", "base.yaml", "lab.yaml"], "lab.yaml:3:7: Two callbacks of this run keep")


def test_an_object_that_is_refused_by_its_class_is_placed_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    for name, value in {**launcher, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    fsdp = "--trainer.distributed={class_path: policyfit.FSDP, init_args: {shard: 8}}"
    _assert_refused(["plan", "base.yaml", fsdp], "command line: FSDP(shard=8, replicate=null) is for 8 processes")


def test_a_run_without_a_policy_is_named_by_its_files() -> None:
    Path("lab.yaml").write_text("trainer: {seed: 3}\n")
    _assert_refused(["plan", "lab.yaml"], "lab.yaml: The section policy is missing")
    Path("lab.yaml").write_text("trainer: {seed: 3}\npolicy:\n")
    _assert_refused(["plan", "lab.yaml"], "lab.yaml:2:1: The section policy is missing")


def test_a_value_of_the_environment_is_refused_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_LOG_EVERY", "abc")
    Path("lab.yaml").write_text("trainer:\n  log_every: ${env:RUN_LOG_EVERY:-25}\n")
    message = (
        "lab.yaml:2:3: trainer.log_every must be int or null, got 'abc'. The value is what ${env:RUN_LOG_EVERY:-25}"
    )
    _assert_refused(["plan", "base.yaml", "lab.yaml"], message)
    assert "${env" not in policyfit("plan", "base.yaml", "lab.yaml", "--trainer.log_every=abc").err


def test_a_schedule_without_an_end_is_told_both_ways_to_give_it_one() -> None:
    words = ["--schedule=policyfit.WarmupCosine", "--trainer.max_epochs=2", "--trainer.max_steps=null"]
    _assert_refused(["plan", "base.yaml", *words], "Set trainer.max_steps, or write schedule.init_args.total_steps.")


def test_the_table_is_as_long_as_promised() -> None:
    assert len({(key, text) for key, text, _ in BAD}) >= 80


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--dev=cpu"], "command line: dev is not a valid key. Did you mean trainer.device?"),
        (["--prec", "no"], "command line: prec is not a valid key. Did you mean trainer.precision?"),
        (["--print_confg"], "--print_confg is not an option. Did you mean --print_config?"),
        (["--with-dat"], "--with-dat is not an option. Did you mean --with-data?"),
        (["--res"], "--res is none of the options --help, --debug, --json, --with-data, --print_config; a key of the"),
        (["--precision"], "--precision needs a value: --precision=VALUE."),
        (
            ["trainer.max_steps=3"],
            "trainer.max_steps=3 does not exist; a YAML file was expected. To set a key write --",
        ),
        (["--resume=true"], "--resume=true is LeRobot's. Write --resume for the newest run, or --resume=PATH."),
        (["--resume=false"], "Write --resume for the newest run, leave it out for a new run."),
        (["--config"], "--config needs a file."),
        (["--config", "--trainer.seed=1"], "--config needs a file."),
        (
            ["--steps=3", "--trainer.max_steps=3"],
            "steps means trainer.max_steps, which is given too. Keep one of them.",
        ),
        (
            ["--policy.use_amp=true"],
            "policy.init_args.use_amp is not a valid key. It is LeRobot's: write trainer.preci",
        ),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(words: list[str], fragment: str) -> None:
    _assert_refused(["plan", "base.yaml", *words], fragment)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("trainer:\n\tseed: 3\n", "lab.yaml:2:1: this is not YAML"),
        ("trainer: {seed: 3}\ntrainer: {}\n", "lab.yaml:2:1: the key 'trainer' is written twice"),
        ("base: &b {seed: 3}\ntrainer:\n  <<: *b\n", "lab.yaml:3:3: merge keys (<<) are not supported."),
        ("trainer: {run_dir: ${env:HOME}}\n", "lab.yaml:1:21: this is not YAML"),
        ("trainer: {run_dir: ${env:HOME}}\n", "Within [ ] and { } put ${...} in double quotes."),
        ('a: "${env:HOME}" b: 3\n', "lab.yaml:1:18: this is not YAML: while parsing a block mapping"),
        ("a: {1: 1, '1': 2}\n", "lab.yaml:1:11: the key '1' is written twice; it first stands at lab.yaml:1:5."),
        ("trainer.max_steps: 3\n", "Keys are nested in a file: trainer: {max_steps: ...}."),
        ("policy.init_args.width: 3\n", "Keys are nested in a file: policy: {init_args: {width: ...}}."),
        ("optimizer: {class_path: torch.optim.SGD, init_args.lr: 3}\n", "in a file: init_args: {lr: ...}."),
        ("optimizer: null\nschedule: {lr: 3}\n", "lab.yaml:2:12: schedule must name a torch.optim.lr_scheduler.LRSche"),
        ("schedule: {lr: 3}\n", "Write {class_path: module.Class, init_args: {lr: ...}}."),
        ("code: [., nowhere]\n", "lab.yaml:1:11: code[1] is no folder: 'nowhere'."),
        ("a: 1\nb: x\x07y\n", "lab.yaml:2:5: the character '\\x07' is not allowed in YAML text."),
        ("yes: 3\n", "lab.yaml:1:1: yes is not a valid key."),
        ("3: 3\n", "lab.yaml:1:1: [3] is not a valid key."),
    ],
)
def test_text_that_cannot_be_meant_is_refused_by_its_place(text: str, fragment: str) -> None:
    Path("lab.yaml").write_text(text)
    _assert_refused(["plan", "base.yaml", "lab.yaml"], fragment)


def test_advice_on_variables_is_given_only_where_one_is_in_the_way() -> None:
    Path("lab.yaml").write_text('a: "${env:HOME}" b: 3\n')
    assert "double quotes" not in policyfit("plan", "lab.yaml").err


def test_a_byte_that_is_no_utf_8_is_found_by_its_place() -> None:
    Path("lab.yaml").write_bytes(b"a: 1\nb: \xc3\xa9\xff\n")
    _assert_refused(["plan", "lab.yaml"], "lab.yaml:2:5: this is not text in UTF-8 (byte 10 of the file).")


def test_a_huge_value_is_not_printed_whole() -> None:
    said = policyfit("plan", "base.yaml", f"--trainer.max_steps=[{', '.join(['1'] * 9000)}]")
    assert said.code == 2
    assert len(said.err) < 3000
    assert "trainer.max_steps must be int or null, got [1, 1" in said.err


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file that never ends, found none")
def test_a_file_that_never_ends_is_refused() -> None:
    _assert_refused(["plan", "/dev/zero"], "/dev/zero is larger than 10 MB, so it is no run file.")


def test_a_run_that_ended_before_its_first_checkpoint_can_be_begun_anew() -> None:
    Path("begun").mkdir()
    Path("begun/plan.json").write_text("{}")
    remedy = "It ended before its first one. --resume=auto --trainer.run_dir=begun begins it anew there."
    _assert_refused(["fit", "base.yaml", "--resume=begun"], f"there is no checkpoint in begun. {remedy}")


#: What is refused before the run's data is made, and where.
EARLY: list[tuple[list[str], str]] = [
    (["--changes=lr"], "--changes is for a run that is gone on with. Leave it out, or give --resume, too."),
    (["--resume=nope"], "--resume=nope: there is no checkpoint in nope. Give a run's folder, such as runs/NAME."),
    (["--resume", "runs/x"], "--resume runs/x could be two things. Write --resume=runs/x."),
    (["--resume"], "resume='last' was requested without a run_dir, and no run under runs/ has a checkpoint."),
    (["--optimizer.lr=-1"], "command line: optimizer: making torch.optim.adamw.AdamW failed: ValueError: Invalid"),
    (["--optimizer.fused=true", "--optimizer.foreach=true"], "`fused` and `foreach` cannot be `True` together."),
    (
        ["--schedule={class_path: policyfit.WarmupCosine, init_args: {warmup_steps: -1}}"],
        "command line: schedule: WarmupCosine.warmup_steps must be a whole number of at least 0, got -1.",
    ),
    (
        ["--schedule={class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 0}}"],
        "command line: schedule: making torch.optim.lr_scheduler.StepLR failed: ZeroDivisionError",
    ),
    (
        ["--optimizer={class_path: run_parts.Own, init_args: {lr: 1e-3}}"],
        "command line: optimizer: making run_parts.Own failed: ValueError: lr must be at least 0.01, got 0.001",
    ),
    (
        ["--optimizer={class_path: run_parts.own, init_args: {lr: 1e-3}}"],
        "command line: optimizer: making run_parts.own failed: ValueError: lr must be at least 0.01, got 0.001",
    ),
    (["--optimizer=run_parts.no_optimizer"], "optimizer must be a torch.optim.Optimizer, but run_parts.no_optimizer"),
    (
        ["--schedule={class_path: run_parts.Steep, init_args: {steepness: 0}}"],
        "command line: schedule: making run_parts.Steep failed: ZeroDivisionError",
    ),
    (
        ["--optimizer=run_parts.Own", "--schedule={class_path: run_parts.Steep, init_args: {steepness: -1}}"],
        "command line: schedule: making run_parts.Steep failed: ValueError: too steep",
    ),
    (["--data.train=null"], "base.yaml:2:1: There is nothing to train on: the run names no data.train, and Policy"),
    (
        ["--data.train=null", "--data.val=run_parts.Recorded"],
        "base.yaml:2:1: There is nothing to train on: the run names no data.train, and Policy brings none.",
    ),
    (["--policy=run_parts.Mute"], "command line: policy: Mute has neither forward nor training_step."),
    (["--eval.env=run_parts.Env"], "command line: eval.env: making run_parts.Env failed: RuntimeError: the environme"),
]


@pytest.mark.parametrize(("words", "fragment"), EARLY, ids=[words[-1] for words, _ in EARLY])
def test_what_needs_no_data_is_refused_before_data_is_made(words: list[str], fragment: str) -> None:
    text = BASE.replace("run_parts.Data", "run_parts.Recorded")
    Path("base.yaml").write_text(text if any("env" in w for w in words) else text.replace("eval:", "eval: null  #"))
    _assert_refused(["fit", "base.yaml", *words], fragment)
    assert "the data was made" not in policyfit("fit", "base.yaml", *words).err
    if words[0] != "--data.train=null":
        assert "the data was made" in policyfit("fit", "base.yaml", "--eval=null").err


@pytest.mark.parametrize(("words", "fragment"), EARLY[4:-1], ids=[words[-1] for words, _ in EARLY[4:-1]])
def test_a_plan_refuses_what_a_fit_would(words: list[str], fragment: str) -> None:
    _assert_refused(["plan", "base.yaml", "--eval=null", *words], fragment)


def test_an_optimizer_of_ones_own_is_tried_without_a_trace() -> None:
    """It gets stand-ins with what marks the real parameters, writes into none of these, and draws from no stream."""
    Path("base.yaml").write_text(BASE.replace("eval:", "eval: null  #"))
    own = "{class_path: run_parts.Own, init_args: {lr: 0.5, writes: true, needs: marked}}"
    words = ["--policy=run_parts.Marked", f"--optimizer={own}", "--trainer.run_dir=tried"]
    assert policyfit("fit", "base.yaml", *words).code == 0
    seed_everything(3)
    policy = Marked()
    Trainer("cpu", max_steps=2, seed=3).fit(
        policy, Data(), optimizer=lambda parameters: Own(parameters, 0.5, writes=True, needs="marked")
    )
    for tried, wanted in zip(load("tried", device="cpu").parameters(), policy.parameters(), strict=True):
        assert torch.equal(tried, wanted)


@pytest.mark.parametrize(
    "key",
    [
        "max_steps=0",
        "precision=N",
        "device=gpu",
        "distributed=dp",
        "clip_norm=-1",
        "loggers=[{class_path: run_parts.Half}]",
    ],
)
def test_a_run_that_cannot_start_anywhere_is_not_printed_either(key: str) -> None:
    _assert_refused(["fit", "base.yaml", f"--trainer.{key}", "--print_config"], "command line: ")


LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["fit", f"{LONG}.yaml"],
        ["fit", "base.yaml", f"--resume={LONG}"],
        ["fit", f"--resume={LONG}"],
        ["fit", "--resume=nope"],
        ["fit", "base.yaml", "--resume=base.yaml"],
        ["fit", "--resume=base.yaml"],
        ["validate", "nope"],
        ["validate", LONG],
        ["eval", "base.yaml"],
        ["checkpoints", "nope"],
        ["checkpoints", LONG],
    ],
)
def test_what_is_not_there_is_a_request_that_cannot_be_honoured(words: list[str]) -> None:
    _assert_refused(words, "ConfigError")
