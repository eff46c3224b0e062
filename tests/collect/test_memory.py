"""Memory that was freed goes back to the system: else what many small arrays took adds to what large ones take."""

import ctypes
import subprocess
import sys

import pytest

CODE = """
import re, sys
from pathlib import Path
from dpro_search.collect._memory import give_back

def taken():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

small = [bytes(20_000 + i % 7) for i in range(5_000)]  # 100 MB, each too small for pages of its own
kept = small[::100]
del small
before = taken()
give_back()
print(before, taken())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_what_small_arrays_took_is_given_back():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before_kb, after_kb = map(int, done.stdout.split())
    assert before_kb - after_kb > 50_000
