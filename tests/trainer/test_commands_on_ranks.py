"""The commands under a launcher: what each rank does, and that rank 0 alone prints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run
from ranks import Policy
from run_parts import Said, policyfit

from policyfit.trainer import cli

RUN = """\
policy: ranks.Policy
data: {train: ranks.Samples, val: ranks.Samples}
trainer: {device: cpu, batch_size: 4, accumulate: 2, max_steps: 3, seed: 3, run_dir: done}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}
"""
WEIGHTS = sum(p.numel() * 4 for p in Policy().parameters())
BLOCK = 12 * 12 + 12


def commands(folder: str, *each: list[str]) -> list[Said]:
    os.chdir(folder)
    cli._EXIT_DELAY_S = cli._UNTOLD_DELAY_S = 0.1
    return [policyfit(*words) for words in each]


def _of_ranks(folder: Path, *each: list[str]) -> Any:
    (folder / "run.yaml").write_text(RUN)
    return run(commands, str(folder), *each)


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_a_plan_is_that_of_all_ranks_and_rank_0_alone_prints_it(tmp_path: Path, distributed: str) -> None:
    plan = ["plan", "run.yaml", f"--trainer.distributed={distributed}"]
    first, second = _of_ranks(tmp_path, plan, [*plan, "--json", "--with-data"])
    assert [(said.code, said.out, said.err) for said in second] == [(0, "", "")] * 2
    assert [(said.code, said.err) for said in first] == [(0, "")] * 2
    assert "16 samples an update: 2 micro-batches of 4 on 2 processes" in first[0].out
    found = json.loads(first[1].out)
    assert found["distribution"]["chosen"] == distributed
    spread = "weights over 2 ranks, gathered unit by unit: Block (2), the rest"
    assert (spread in found["distribution"]["reason"]) == (distributed == "fsdp")
    assert found["batch"]["numbers"] == {"per_rank": 4, "accumulate": 2, "ranks": 2, "global": 16}
    assert found["epoch"]["numbers"] == {"samples": 44, "micro_batches": 6, "updates": 3}
    assert found["memory"]["chosen"].endswith(" kB on each rank")
    here = WEIGHTS
    if distributed == "fsdp":  # of an odd number of rows rank 0 has one more
        here = 4 * (6 * 6 + 6 + 2 * BLOCK // 2 + 2 * 12 + 2)
    numbers = found["memory"]["numbers"]
    assert (numbers["parameters"], numbers["gradients"], numbers["optimizer"]) == (here, here, 2 * here)
    assert found["checkpoints"]["numbers"]["bytes_each"] == 3 * WEIGHTS


def test_a_plan_that_is_refused_ends_on_every_rank_and_leaves_the_others(tmp_path: Path) -> None:
    sharded = ["plan", "run.yaml", "--trainer.distributed=fsdp", "--policy=run_parts.Policy"]  # without units
    ranks = _of_ranks(tmp_path, sharded, ["plan", "run.yaml"])
    for refused, planned in ranks:
        assert (refused.code, planned.code) == (2, 0)
    written = "{class_path: policyfit.FSDP, init_args: {wrap: [Sequential]}}"
    assert f"--trainer.distributed='{written}'" in ranks[0][0].err


def test_argument_of_the_policy_that_is_not_the_same_on_all_ranks_is_told(tmp_path: Path) -> None:
    policy = "--policy={class_path: run_parts.Policy, init_args: {names: ['camera ${env:RANK}']}}"
    first, _ = _of_ranks(tmp_path, ["fit", "run.yaml", policy, "--data={train: run_parts.Data}"])
    told = "policy.init_args.names is ['camera 1'] on rank 1, and ['camera 0'] on rank 0"
    assert told in " ".join(first[0].out.split()), first[0]


def _failing(rank: int, hook: str, draw: int, words: str, kind: str = "Fails") -> dict[str, Any]:
    arguments = {"rank": rank, "hook": hook, "micro_batch": draw, "words": words}
    return {"class_path": f"failing.{kind}", "init_args": arguments}


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_the_error_of_one_rank_is_shown_once(tmp_path: Path, distributed: str) -> None:
    places = [(0, "on_after_backward", 2), (1, "on_after_backward", 2), (1, "setup", 0)]
    each = []
    for number, place in enumerate(places):
        fails = json.dumps([_failing(*place, "the disk is full")])
        keys = {"distributed": distributed, "run_dir": f"run{number}", "callbacks": fails}
        each.append(["fit", "run.yaml", *(f"--trainer.{key}={value}" for key, value in keys.items())])
    for number, said in enumerate(zip(*_of_ranks(tmp_path, *each), strict=True)):
        assert [one.code for one in said] == [1, 1], said[0].err
        assert "".join(one.out + one.err for one in said).count("the disk is full") == 1, number
        assert "the disk is full" in said[0].err
        assert "Run again with --debug for the traceback." in said[0].err
        assert (said[1].out, said[1].err) == ("", "")
        assert places[number][1] == "setup" or "failed at step 1, 0 skipped, " in said[0].out
        assert (tmp_path / f"run{number}" / "checkpoints" / "000001").is_dir() == (places[number][1] != "setup")


def test_a_rank_that_leaves_by_itself_is_told_and_its_exit_code_stays(tmp_path: Path) -> None:
    leaves = json.dumps([{"class_path": "failing.Panics", "init_args": {"kind": "builtins.SystemExit"}}])
    first, second = _of_ranks(tmp_path, ["fit", "run.yaml", "--trainer.max_steps=9", f"--trainer.callbacks={leaves}"])
    assert [first[0].code, second[0].code] == [1, 1]  # sys.exit of a text
    assert "Rank 1 failed, so all ended after update 1: SystemExit: a panic" in first[0].err
    assert (second[0].out, second[0].err) == ("", "")


def test_the_errors_of_two_ranks_are_both_shown(tmp_path: Path) -> None:
    kinds = ["Fails", "FailsToo"]
    words = ["the disk is full", "the cable is out"]
    both = [_failing(rank, "on_after_backward", 2, words[rank], kind) for rank, kind in enumerate(kinds)]
    first, second = _of_ranks(tmp_path, ["fit", "run.yaml", f"--trainer.callbacks={json.dumps(both)}"])
    assert words[0] in first[0].err
    assert words[1] in second[0].err
    assert "RuntimeError on rank 1" in second[0].err


def test_what_fails_on_one_rank_before_it_meets_the_others_is_shown_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for delay in ("_EXIT_DELAY_S", "_UNTOLD_DELAY_S"):
        monkeypatch.setattr(cli, delay, 0.1)
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    Path("run.yaml").write_text(RUN)
    said = policyfit("fit", "run.yaml", "--data.train={class_path: failing.Absent, init_args: {rank: 1}}")
    assert (said.code, said.out) == (2, "")
    assert "ConfigError on rank 1" in said.err
    assert "OSError: no such share on this machine" in said.err


def test_what_is_measured_and_what_needs_no_other_rank_is_printed_by_rank_0(tmp_path: Path) -> None:
    alone = [["doctor"], ["schema"], ["completion", "bash"], ["checkpoints", "done"], ["fit", "--resume=done"]]
    alone[-1].append("--print_config")
    measured = ["validate", "done"]
    first, second = _of_ranks(tmp_path, ["fit", "run.yaml"], measured, *alone)
    assert [said.code for said in first + second] == [0] * 14
    assert [said.out for said in second] == [""] * 7
    assert all(said.out for said in first[1:])
    line, *metrics = first[1].out.splitlines()
    assert line == "checkpoint done/checkpoints/000003  step 3  weights raw  device cpu  precision no"
    assert [words.split()[0] for words in metrics] == ["val/error", "val/loss"]


def test_a_sharded_run_is_evaluated_with_the_weights_that_it_validates_with(tmp_path: Path) -> None:
    average = {"class_path": "policyfit.EMA", "init_args": {"decay": 0.9, "warmup": False}}
    acts = ["--eval={env: ranks.Telling, episodes: 2}", f"--trainer.callbacks={json.dumps([average])}"]
    (fit,), _ = _of_ranks(tmp_path, ["fit", "run.yaml", "--trainer.distributed=fsdp", *acts])
    assert fit.code == 0, fit.err
    returns = {}
    for weights in ("raw", "ema"):
        said = policyfit("eval", "done", f"--weights={weights}").out
        returns[weights] = re.search(r"return  mean (\S+)", said)[1]  # type: ignore[index]
    assert returns["raw"] != returns["ema"]
    assert f"return  mean {returns['ema']} " in fit.out


def test_a_sharded_run_goes_on_in_one_process_as_its_refusal_says(tmp_path: Path) -> None:
    _of_ranks(tmp_path, ["fit", "run.yaml", "--trainer.distributed={class_path: policyfit.FSDP}"])
    more = ["--resume=done", "--trainer.max_steps=4"]
    refused = policyfit("fit", *more)
    assert refused.code == 2
    assert "The run goes on in this one process, too: --trainer.distributed=auto" in refused.err
    assert policyfit("fit", *more, "--trainer.distributed=auto").code == 0
    assert Path("done/checkpoints/000004").is_dir()
    assert "--trainer.distributed=auto" not in policyfit("plan", "run.yaml", "--trainer.distributed=fsdp").err
