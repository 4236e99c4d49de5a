"""Ideas beside LLN + Diag in a trained model: the numbers of their records, which are of
experiments/trained as those of trained.py. The page of them is in ideas_page.py.

SPDX-License-Identifier: Apache-2.0
"""

import statistics

from harness import trained, trained_plan
from harness.trained import cosine, last_error, mean_error, recovered

OURS, THEIRS, DIAG = "lln+diag-entropy", "softmax+diag", "diag"
GATED = (f"{OURS}-gate", f"{THEIRS}-gate")
THREE, FOUR = f"{OURS}-gate-centred-wide", f"{OURS}-gate-contrast-centred-wide"
ROWS = trained_plan.rows() | trained_plan.idea_rows()
APART = ("rotations", "narrow")  # which take an idea apart
CERTAIN = 3  # errors of a difference that it must have to be called one


def read(folder):
    return trained.read(folder, ROWS)


def numbers(found, name, of):
    return [of(own) for own in recovered(found, name)]


def known(found, *names):
    return all(recovered(found, name) for name in names)


def gap(found, of):
    """From softmax to LLN, both beside Diag and without a gate."""
    own, soft = (statistics.fmean(numbers(found, name, of)) for name in (OURS, THEIRS))
    return own - soft


def closed(found, name, of):
    """The share of the gap that a row makes up for, or nothing."""
    if not known(found, OURS, THEIRS, name):
        return None
    before, after = (statistics.fmean(numbers(found, row, of)) for row in (OURS, name))
    return (before - after) / gap(found, of)


def verdict(found, name, before=OURS):
    """Of a row against another, by three measures: those by which it is better, and those by which
    it is worse; nothing where there are not seeds enough. A change counts from CERTAIN errors
    on."""
    better, worse = 0, 0
    for of, sign in ((last_error, -1), (mean_error, -1), (cosine, 1)):
        number, error = trained.difference(*(numbers(found, row, of) for row in (before, name)))
        if error is None:
            return None
        better += sign * number > CERTAIN * error
        worse += -sign * number > CERTAIN * error
    return better, worse


def of_lln(found):
    """Rows of LLN with ideas that were trained, the smallest error first."""
    names = [name for name in trained_plan.idea_rows() if name.startswith(OURS)]
    own = {name: trained.recovered_mean(found, name, last_error) for name in names}
    return sorted((name for name in own if own[name] is not None), key=own.get)


def alone(found):
    """Rows with one idea of the zoo, the smallest error first."""
    names = [name for name in of_lln(found) if len(ROWS[name].ideas) == 1]
    return [name for name in names if ROWS[name].ideas[0] not in APART]
