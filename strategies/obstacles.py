"""Why a device cannot be had on a machine, and what to do about it: pure functions of the facts."""

from __future__ import annotations

from typing import NamedTuple

from .facts import GPU, MASKS, MachineFacts, local_rank

_BUILDS = {"NVIDIA": "CUDA", "AMD": "ROCm"}
_MASK_REMEDY = {
    "cuda": "Unset CUDA_VISIBLE_DEVICES, or name GPUs that exist; empty or -1 hides all of them.",
    "rocm": "Set HIP_VISIBLE_DEVICES alone and unset the others. ROCR_VISIBLE_DEVICES acts first and "
    "renumbers what it leaves from 0, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES count within that, and "
    "empty or -1 in any of them hides all GPUs.",
    "xpu": "Unset them, or name devices that exist; ZE_AFFINITY_MASK takes numbers such as 0,1 (not 0.0).",
}
_DRIVER_REMEDY = {
    "cuda": "Install an NVIDIA driver new enough for this build; give a container its GPUs (--gpus all).",
    "rocm": "Load the amdgpu driver and join the groups video and render; give a container its GPUs "
    "(--device /dev/kfd --device /dev/dri --group-add video).",
    "xpu": "Install Intel's GPU driver with Level Zero and join the group render; give a container its GPUs "
    "(--device /dev/dri).",
}


class Obstacle(NamedTuple):
    """Why a device cannot be had, as a clause, and what to do about it, as a sentence."""

    cause: str
    remedy: str


def cuda_obstacle(index: int, facts: MachineFacts) -> Obstacle | None:
    """What keeps the machine from having ``cuda:index``: the build, the vendor, the masks or the driver."""
    if facts.cuda:
        return _beyond("cuda", index, facts.cuda, facts)
    vendors = present_vendors(facts)
    if facts.build not in ("cuda", "rocm"):
        found = f", although an {' and an '.join(vendors)} GPU is present" if vendors else ""
        wanted = " or ".join(f"{_BUILDS[vendor]} ({vendor})" for vendor in vendors or _BUILDS)
        return Obstacle(
            f"this PyTorch ({facts.torch_version}) was built without CUDA and ROCm{found}",
            f"Install a build of PyTorch for {wanted}.",
        )
    vendor, other = ("NVIDIA", "AMD") if facts.build == "cuda" else ("AMD", "NVIDIA")
    if vendors == [other]:
        return Obstacle(
            f"the GPU here is an {other} one and this PyTorch ({facts.torch_version}) is a {_BUILDS[vendor]} "
            "build, which cannot use it",
            f"Install a {_BUILDS[other]} build of PyTorch.",
        )
    if masks := masks_set(facts):
        return Obstacle(f"torch sees no GPU with {masks}{_said(facts)}", _MASK_REMEDY[facts.build])
    found = f"an {vendor} GPU is present but torch cannot use it" if vendors else f"no {vendor} GPU was found"
    return Obstacle(f"{found}{_said(facts)}", _DRIVER_REMEDY[facts.build])


def xpu_obstacle(index: int, facts: MachineFacts) -> Obstacle | None:
    """What keeps the machine from having ``xpu:index``: the build, the masks or the driver."""
    if facts.xpu:
        return _beyond("xpu", index, facts.xpu, facts)
    if facts.build != "xpu":
        cause = f"this PyTorch ({facts.torch_version}) was built without XPU"
        return Obstacle(cause, "Where there is an Intel GPU, install an XPU build of PyTorch.")
    if masks := masks_set(facts):
        return Obstacle(f"torch sees no Intel GPU with {masks}{_said(facts)}", _MASK_REMEDY["xpu"])
    return Obstacle(f"no Intel GPU was found{_said(facts)}", _DRIVER_REMEDY["xpu"])


def mps_obstacle(facts: MachineFacts) -> Obstacle | None:
    """What keeps the machine from having ``mps``: the build, the system, or a first operation that failed."""
    if facts.mps:
        return None
    if facts.build != "mps":
        return Obstacle(
            f"this PyTorch ({facts.torch_version}) was built without MPS",
            "MPS needs an Apple silicon computer and the PyTorch that pip installs there.",
        )
    macos = f" on macOS {facts.macos[0]}.{facts.macos[1]}" if facts.macos else ""
    return Obstacle(f"torch cannot use the GPU{macos}{_said(facts)}", "Update macOS, which brings the driver.")


def present_vendors(facts: MachineFacts) -> list[str]:
    """The vendors whose GPU the system shows, whether or not torch can use it."""
    present = {"NVIDIA": facts.nvidia_gpu_present, "AMD": facts.amd_gpu_present}
    return [vendor for vendor, is_present in present.items() if is_present]


def masks_set(facts: MachineFacts) -> str:
    """The visibility variables that are set, as in "HIP_VISIBLE_DEVICES='' (empty)"; "" without any."""
    values = [(name, facts.variable(name)) for name in MASKS[facts.build]]
    return " and ".join(f"{n}={v!r}{'' if v else ' (empty)'}" for n, v in values if v is not None)


def _beyond(kind: str, index: int, gpus: tuple[GPU, ...], facts: MachineFacts) -> Obstacle | None:
    """The obstacle of an index past the last device."""
    count = len(gpus)
    if index < count:
        return None
    names = ", ".join(f"{kind}:{i}" for i in range(count))
    limited = f", with {masks}" if (masks := masks_set(facts)) else ""
    seen = f"torch sees {count} device{'' if count == 1 else 's'} ({names}){limited}"
    if index == local_rank(facts):
        return Obstacle(
            f"LOCAL_RANK is {index} and {seen}",
            f"Start no more than {count} on a machine (torchrun --nproc-per-node={count}). "
            f"Where each process has a GPU of its own, use device='{kind}:0'.",
        )
    return Obstacle(f"its index is {index} and {seen}", f"Use device='{kind}:{count - 1}' or a lower index.")


def _said(facts: MachineFacts) -> str:
    return f" (torch says: {facts.fault.rstrip('.')})" if facts.fault else ""
