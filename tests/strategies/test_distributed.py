"""The single process keeps what every distribution promises, as its plain case; and how processes are launched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from distribution_contract import PROMISES, Make
from torch import nn

from policyfit.strategies.ddp import DDP
from policyfit.strategies.device import CPUDevice, MPSDevice
from policyfit.strategies.distributed import SingleProcess
from policyfit.strategies.errors import ConfigError, DistributedError
from policyfit.strategies.facts import MachineFacts
from policyfit.strategies.fsdp import FSDP
from policyfit.trainer.resolve import resolve_distribution

PLACES = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def launched(torch_version: str = "2.13.0", **environment: str) -> MachineFacts:
    return MachineFacts(torch_version=torch_version, environment=tuple({**PLACES, **environment}.items()))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_a_single_process_keeps_the_promise(promise: object) -> None:
    make: Make = SingleProcess
    promise(make)  # type: ignore[operator]


def test_a_single_process_leaves_the_policy_alone_and_loses_nobody() -> None:
    alone, policy = SingleProcess(), nn.Linear(2, 1)
    assert (alone.name, alone.rank, alone.local_rank, alone.world_size, alone.is_main) == ("none", 0, 0, 1, True)
    alone.setup(CPUDevice())
    assert alone.wrap(policy) is policy
    assert alone.local(policy.weight) is alone.whole(policy.weight) is policy.weight
    assert not alone.is_lost(RuntimeError("gloo"))
    assert not alone.break_off()
    alone.report(ValueError("anything"))
    alone.teardown()


def test_only_rank_0_is_the_main_process() -> None:
    other = SingleProcess()
    other.rank = 1
    assert not other.is_main


# What is launched --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "facts", "chosen", "kind", "reason"),
    [
        ("auto", MachineFacts(), "none", SingleProcess, "one process"),
        ("none", MachineFacts(), "none", SingleProcess, "one process"),
        ("auto", launched(WORLD_SIZE="1"), "none", SingleProcess, "one process"),
        ("auto", launched(), "ddp", DDP, "a launcher started 4 processes"),
        ("ddp", launched(), "ddp", DDP, "a launcher started 4 processes"),
        ("fsdp", launched(), "fsdp", FSDP, "a launcher started 4 processes"),
    ],
)
def test_distribution_follows_request_and_launcher(
    request_: str, facts: MachineFacts, chosen: str, kind: type, reason: str
) -> None:
    choice = resolve_distribution(request_, facts)
    assert (choice.asked, choice.chosen, choice.reason) == (request_, chosen, reason)
    assert type(choice.value) is kind


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_one_of_several_tasks_that_do_not_find_each_other_is_refused_unless_it_is_to_be_alone(variable: str) -> None:
    facts = MachineFacts(environment=((variable, "4"),))
    with pytest.raises(
        DistributedError, match=rf"^4 tasks were started \({variable}\), but WORLD_SIZE is not set, so that"
    ):
        resolve_distribution("auto", facts)
    assert resolve_distribution("none", facts).chosen == "none"
    assert resolve_distribution("auto", MachineFacts(environment=((variable, "1"),))).chosen == "none"
    assert resolve_distribution("auto", launched(**{variable: "4"})).chosen == "ddp"


def test_distribution_object_is_taken_and_checked() -> None:
    sharded = FSDP(shard=2, replicate=2)
    choice = resolve_distribution(sharded, launched())
    assert choice.value is sharded
    assert (choice.asked, choice.chosen, choice.reason) == ("fsdp", "fsdp", "an object was given")
    with pytest.raises(DistributedError, match="one process"):
        resolve_distribution(sharded, MachineFacts())


@pytest.mark.parametrize(("wrong", "near"), [("dpp", "ddp"), ("FSDP", "fsdp"), (2, "auto"), ("deepspeed", "auto")])
def test_distribution_that_is_none_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"got {wrong!r}.\nUse distributed='{near}'\."):
        resolve_distribution(wrong, MachineFacts())


@pytest.mark.parametrize(
    ("request_", "facts", "message"),
    [
        (
            "ddp",
            MachineFacts(),
            r"WORLD_SIZE is not set\)\.\n.*: torchrun --nproc-per-node=2 -m policyfit fit RUN.yaml",
        ),
        ("fsdp", launched(WORLD_SIZE="1"), r"'fsdp' was requested, but this is one process \(WORLD_SIZE is 1\)"),
        ("none", launched(), r"a launcher started 4 processes .*train a policy of its own\.\nUse distributed='auto'"),
        ("auto", launched(MASTER_ADDR="", RANK=""), r"did not set RANK, MASTER_ADDR, .*\nStart them with torchrun"),
        ("fsdp", launched("2.8.0+cu128"), r"needs PyTorch 2\.9 or later, and this is 2\.8\.0\+cu128\.\n"),
        ("fsdp", launched("2.6.0"), r"needs PyTorch 2\.9 or later"),
    ],
)
def test_launch_that_does_not_fit_is_refused_with_what_to_do(request_: str, facts: MachineFacts, message: str) -> None:
    with pytest.raises(DistributedError, match=message):
        resolve_distribution(request_, facts)


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "precision"),
        ("ACCELERATE_FP8_BACKEND", "TE", "precision"),
        ("ACCELERATE_USE_FSDP", "true", "distributed"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "distributed"),
        ("ACCELERATE_USE_MEGATRON_LM", "1", "distributed"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "accumulate"),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.0", "clip_norm"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", "compile"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:3", "device"),
        ("ACCELERATE_USE_CPU", "true", "device"),
        ("FSDP_OFFLOAD_PARAMS", "true", "distributed"),
        ("FSDP_SHARDING_STRATEGY", "FULL_SHARD", "distributed"),
        ("MEGATRON_LM_TP_DEGREE", "2", "distributed"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "distributed"),
    ],
)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_variable_that_would_change_the_run_is_refused_by_name(
    kind: str, variable: str, value: str, setting: str
) -> None:
    with pytest.raises(DistributedError, match=rf"{variable}={value}, which .*\nUnset it and use .* {setting};"):
        resolve_distribution(kind, launched(**{variable: value}))


def test_every_variable_that_would_change_the_run_is_named_at_once() -> None:
    with pytest.raises(DistributedError, match=r"ACCELERATE_USE_FSDP=1, FSDP_VERSION=2, .*\nUnset them and"):
        resolve_distribution("ddp", launched(ACCELERATE_USE_FSDP="1", FSDP_VERSION="2"))


def test_variables_that_accelerate_launch_always_sets_are_no_hindrance() -> None:
    always = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_CPU_AFFINITY": "True",
        "ACCELERATE_LOG_LEVEL": "info",
    }
    assert resolve_distribution("auto", launched(**always)).chosen == "ddp"


def test_probe_sees_the_variables_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    from policyfit.strategies.facts import probe

    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    facts = probe()
    assert (facts.variable("FSDP_OFFLOAD_PARAMS"), facts.variable("MASTER_ADDR")) == ("true", "node-0")


@pytest.mark.parametrize(
    ("shard", "replicate", "processes"), [(3, None, 3), (2, 4, 8), (None, 3, 3), (None, 8, 8), (4, 2, 8)]
)
def test_mesh_that_is_not_made_of_the_launched_ranks_is_refused(
    shard: int | None, replicate: int | None, processes: int
) -> None:
    with pytest.raises(DistributedError, match=rf"is for {processes} processes, but 4 were launched"):
        FSDP(shard=shard, replicate=replicate).check(launched())


@pytest.mark.parametrize(("shard", "replicate"), [(None, None), (4, None), (2, 2), (None, 2), (1, 4), (None, 4)])
def test_mesh_of_all_launched_ranks_is_taken(shard: int | None, replicate: int | None) -> None:
    FSDP(shard=shard, replicate=replicate).check(launched())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DDP(timeout=0), "DDP.timeout must be a number of seconds above 0, got 0"),
        (lambda: DDP(timeout=float("inf")), "DDP.timeout"),
        (lambda: DDP(timeout=True), "DDP.timeout"),
        (lambda: FSDP(timeout="10"), "FSDP.timeout"),  # type: ignore[arg-type]
        (lambda: DDP(find_unused_parameters=1), "find_unused_parameters must be true or false"),  # type: ignore[arg-type]
        (lambda: FSDP(shard=0), "FSDP.shard must be a whole number of ranks of at least 1"),
        (lambda: FSDP(replicate=True), "FSDP.replicate"),
        (lambda: FSDP(wrap="Block"), "FSDP.wrap must be a list"),
        (lambda: FSDP(wrap=[nn.Linear]), "FSDP.wrap must be a list"),  # type: ignore[list-item]
        (lambda: FSDP(reshard_after_forward=2), "FSDP.reshard_after_forward"),  # type: ignore[arg-type]
        (lambda: FSDP(cpu_offload="yes"), "FSDP.cpu_offload"),  # type: ignore[arg-type]
        (lambda: FSDP(reduce_dtype="float16"), "FSDP.reduce_dtype must be float32 or bfloat16"),  # type: ignore[arg-type]
    ],
)
def test_setting_that_cannot_be_meant_is_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("strategy", [DDP(), FSDP(wrap=["Block"])])
def test_torch_that_is_built_without_collectives_is_refused(strategy: DDP | FSDP) -> None:
    with pytest.raises(DistributedError, match=r"PyTorch 2\.13\.0 of this machine is built without torch\.distributed"):
        strategy.check(replace(launched(), can_distribute=False))


def test_device_without_collectives_is_refused() -> None:
    with pytest.raises(DistributedError, match=r"no collectives on mps\.\nUse one process"):
        DDP().setup(MPSDevice())
    with pytest.raises(DistributedError, match="keeps shards in host memory"):
        FSDP(cpu_offload=True).setup(CPUDevice())
