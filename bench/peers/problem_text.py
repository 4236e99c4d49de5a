"""What the peers share: the text of a problem, its sizes, and percentiles of samples.

SPDX-License-Identifier: Apache-2.0
"""

import re
import sys

SHAPE = (
    r"b(?P<b>\d+)h(?P<h>\d+)(?:k(?P<k>\d+))?"
    r"n(?P<n>\d+)(?:m(?P<m>\d+))?d(?P<d>\d+)(?:v(?P<v>\d+))?"
)


def problem_pattern(device, kinds):
    """What the peers know of the problems of `lln bench`: neither masks nor packing."""
    return re.compile(
        rf"(?P<op>forward|backward|train):(?P<dtype>f32|f16|bf16):{device}:{SHAPE}"
        rf":(?P<kind>{kinds})(?P<causal>:causal)?"
    )


def sizes_of(problem):
    return {
        name: int(problem[name] or problem[other])
        for name, other in (
            ("b", "b"),
            ("h", "h"),
            ("k", "h"),
            ("n", "n"),
            ("m", "n"),
            ("d", "d"),
            ("v", "d"),
        )
    }


def softmax_flops(size, training):
    pairs = size["b"] * size["h"] * size["n"] * size["m"]
    return (3.5 if training else 1) * 2 * pairs * (size["d"] + size["v"])


def percentile(ordered, percent):
    at = percent / 100 * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def read_problems(arguments):
    problems = list(arguments.problem)
    if arguments.set:
        lines = (
            line.split("#")[0].strip()
            for line in arguments.set.read_text(encoding="utf-8").splitlines()
        )
        problems += [line for line in lines if line]
    if not problems:
        sys.exit("nothing to measure: give PROBLEM or --set FILE")
    return problems
