"""Several threads of a new process compile their first kernels at the same time."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
from gatewise.kernels.cuda import toolchain

sys.setswitchinterval(1e-5)  # threads are interrupted in the middle of imports
together, errors = threading.Barrier(8), []

def load():
    together.wait()
    try:
        assert toolchain._core().Program
    except Exception as error:
        errors.append(error)

threads = [threading.Thread(target=load) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(repr(errors[0]) if errors else 0)
"""


def test_all_of_them_find_the_compiler():
    pytest.importorskip("cuda.core")
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
