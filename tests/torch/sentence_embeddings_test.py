"""The example sentence_embeddings, and lln embed, on a BERT-type folder of a few kilobytes that is
made here.

usage: sentence_embeddings_test.py PROGRAM [LLN_TORCH]
"""

# SPDX-License-Identifier: Apache-2.0
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "eats", "food", "##s", "."]
DIM, INNER, LAYERS, TOKENS = 12, 20, 2, 16


def shapes() -> dict[str, list[int]]:
    """Names and shapes of transformers' BertModel."""
    embeddings = {"word": len(PIECES), "position": TOKENS, "token_type": 2}
    found = {f"embeddings.{kind}_embeddings.weight": [n, DIM] for kind, n in embeddings.items()}
    norms, linears = ["embeddings.LayerNorm"], {}
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linears[f"{layer}.attention.{name}"] = [DIM, DIM]
        linears[f"{layer}.intermediate.dense"] = [INNER, DIM]
        linears[f"{layer}.output.dense"] = [DIM, INNER]
    for name in norms:
        found |= {f"{name}.weight": [DIM], f"{name}.bias": [DIM]}
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def write_folder(folder: Path) -> None:
    config = {
        "model_type": "bert",
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 3,
        "max_position_embeddings": TOKENS,
        "type_vocab_size": 2,
        "vocab_size": len(PIECES),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    header, data, draw = {}, b"", random.Random(0)
    for name, shape in shapes().items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        begin = len(data)
        if "LayerNorm" in name:
            values = [1.0 if name.endswith("weight") else 0.0] * count
        else:
            values = [draw.gauss(0, 0.5) for _ in range(count)]
        data += struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def check_lengths(program: str, folder: Path) -> None:
    """Similarities are cosines, also of a model whose embeddings have any length."""
    (folder / "modules.json").write_text(json.dumps([{"type": "models.Pooling"}]))
    sentences = ["a man", "food", "man eats food", "eats", "a food.", "foods", "men"] * 2
    (folder / "sentences.txt").write_text("\n".join(sentences) + "\n")
    command = [program, "embed", folder, "--input", folder / "sentences.txt"]
    found = run(*command, "--json")
    assert found.returncode == 0, found.stderr
    lengths = [sum(x * x for x in row) ** 0.5 for row in json.loads(found.stdout)["embeddings"]]
    assert max(abs(length - 1) for length in lengths) > 0.1, lengths
    lines = run(*command).stdout.splitlines()
    assert len(lines) == 2 * len(sentences), lines
    # Every sentence is there twice, so the nearest is itself.
    for number, sentence in enumerate(sentences):
        assert lines[2 * number].split() == ["1.000", *sentence.split()], lines[2 * number]
        assert lines[2 * number + 1].split() == sentence.split(), lines[2 * number + 1]


def main() -> None:
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fault = run(program, folder)
        assert fault.returncode == 1 and "config.json" in fault.stderr, fault
        write_folder(folder)
        done = run(program, folder, "A man eats foods.", "a MAN eats foods .", "Food eats a man!")
        if len(sys.argv) > 2:
            check_lengths(sys.argv[2], folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [lines[0], lines[4]] == ["softmax, as trained", "LLN+Diag"], done.stdout
    print(done.stdout)
    for rows in (lines[1:4], lines[5:8]):
        table = [[float(x) for x in line.split("   ")[0].split()] for line in rows]
        # The first two are the same tokens, the third is not.
        assert table[0][:2] == table[1][:2] == [1.0, 1.0], table
        assert all(abs(table[i][j] - table[j][i]) < 1e-6 for i in range(3) for j in range(3))
        assert table[0][2] < 0.9999, table


if __name__ == "__main__":
    main()
