"""Whether torch can compute on a device, asked before anything is started that would only fail later.

    python -m nous_node.node.device cuda:1      # prints what is missing; nothing where all is well

A node's own process never imports torch, so that it stays small: a child of it looks.
"""

from __future__ import annotations

import subprocess
import sys

from nous_node.protocol.errors import LocalError

LOOK_SECONDS = 180.0
"""Until torch is imported from a slow disk."""


class DeviceError(LocalError):
    """This machine has no such device, or torch cannot use it."""


def check_device(device: str) -> None:
    """Raises DeviceError, which says what is missing and what to do. The CPU is always there."""
    if device == "cpu":
        return
    command = [sys.executable, "-P", "-m", "nous_node.node.device", device]
    try:
        looked = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"torch did not say within {LOOK_SECONDS:.0f} s whether it has {device}."
        ) from error
    if looked.returncode:
        raise DeviceError(
            f"torch failed while looking for {device}: run `nous-node doctor`, or use --device cpu."
        )
    if looked.stdout.strip():
        raise DeviceError(f"{looked.stdout.strip()} Use --device cpu, or one that `nous-node doctor` lists.")


def devices() -> list[str]:
    """All that torch can compute on here. Imports torch."""
    import torch

    apple = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())), *apple]


def missing(device: str) -> str:
    """Why there is no such device, or "" where there is one. Imports torch."""
    import torch

    if device in devices() or (device == "cuda" and "cuda:0" in devices()):
        return ""
    if device == "mps":
        return "The device mps is missing: torch finds no Apple GPU here."
    if torch.version.cuda is None and torch.version.hip is None:
        return f"The device {device} is missing: this torch ({torch.__version__}) is built without CUDA."
    count = torch.cuda.device_count()
    seen = f"only {count} of them" if count else "none"
    return f"The device {device} is missing: torch looks for CUDA GPUs and finds {seen}."


if __name__ == "__main__":
    print(missing(sys.argv[1]))
