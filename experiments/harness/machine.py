"""What the records say of the machine and of the sources.

SPDX-License-Identifier: Apache-2.0
"""

import os
import pathlib
import platform
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def output(*command):
    """What a program prints, or nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_name():
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def describe(device):
    found = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))}
    if device == "cuda":
        names = output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
        found["gpu"] = names[0] if names else "unknown"
    return found


# What the records come from: the library, its package, the experiments and the examples they use.
SOURCES = ("src", "lln_torch", "include", "cli", "python", "experiments", "examples/python")
NOT_SOURCES = (":(exclude)experiments/*/records.*",)  # a run writes them itself


def revision():
    """The commit, with + where files of SOURCES differ from it."""
    commit = output("git", "rev-parse", "--short=12", "HEAD")
    if not commit:
        return ""
    changed = output("git", "status", "--porcelain", "--", *SOURCES, *NOT_SOURCES)
    return commit + ("+" if changed else "")
