"""Data for the small experiments, made from a fixed seed: text with words that come back inside a
document, as token shards of bytes, and grey pictures of four shapes in the form of CIFAR-10.

    make_data.py DIR LLN

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import random
import subprocess
import sys

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
ENDS = (
    "The {0} sees the {1}.",
    "A {0} and a {1} meet.",
    "No {0} was near the {1}.",
    "The {1} of the {0} is old.",
    "Then the {0} went to the {1}.",
)
SIDE = 32


def pick(numbers, items):
    """By random() alone, whose numbers Python promises to keep."""
    return items[int(numbers.random() * len(items))]


def make_word(numbers):
    return "".join(
        pick(numbers, CONSONANTS) + pick(numbers, VOWELS)
        for _ in range(2 + int(2 * numbers.random()))
    )


def text(documents, seed):
    """A document takes its nouns from a few of its own: who looks back knows them."""
    numbers = random.Random(0)
    words = sorted({make_word(numbers) for _ in range(400)})
    numbers = random.Random(seed)
    lines = []
    for _ in range(documents):
        nouns = [pick(numbers, words) for _ in range(4)]
        lines.append(
            " ".join(
                pick(numbers, ENDS).format(pick(numbers, nouns), pick(numbers, nouns))
                for _ in range(40)
            )
            + "\n\n"
        )
    return "".join(lines)


def picture(numbers):
    """A class and 32 x 32 grey bytes: stripes of two directions, a disc or a ring, in noise."""
    kind = int(4 * numbers.random())
    shift, size = int(8 * numbers.random()), 6 + 6 * numbers.random()
    x0, y0 = 10 + 12 * numbers.random(), 10 + 12 * numbers.random()
    pixels = bytearray()
    for y in range(SIDE):
        for x in range(SIDE):
            away = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            lit = (
                ((y + shift) // 4 % 2),
                ((x + shift) // 4 % 2),
                away < size,
                size - 2.5 < away < size,
            )[kind]
            pixels.append(int(60 + 60 * bool(lit) + 100 * numbers.random()))
    return bytes([kind]) + bytes(pixels)


def main(folder, lln):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text(400, 1), encoding="utf-8")
    (folder / "held_out.txt").write_text(text(12, 2), encoding="utf-8")
    subprocess.run(
        [
            lln,
            "tokenize",
            str(folder / "text.txt"),
            "--validation",
            str(folder / "held_out.txt"),
            "--tokenizer",
            "bytes",
            "--replace",
            "-o",
            str(folder / "tokens"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for name, count, seed in (("train", 2000, 3), ("test", 200, 4)):
        numbers = random.Random(seed)
        made = b"".join(picture(numbers) for _ in range(count))
        (folder / f"cifar10_gray_{name}.bin").write_bytes(made)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
