"""Memory of a process that moves chunks for long."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

MOVES = """
import resource, sys
from nous_node.node.memory import settle

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if "settled" in sys.argv:
    settle()
before = faults()
for _ in range(100):
    chunks = [bytearray(1 << 20) for _ in range(4)]
    del chunks
print(faults() - before)
"""


def _faults(*words: str) -> int:
    command = [sys.executable, "-c", MOVES, *words]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_for_chunks_is_taken_from_the_system_once() -> None:
    page = resource.getpagesize()
    once = 4 * (1 << 20) // page
    assert _faults("settled") <= 2 * once < 50 * once < _faults()
