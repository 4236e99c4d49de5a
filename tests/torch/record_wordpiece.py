"""Records what transformers' BertTokenizer makes of texts with a small vocabulary, as the header
that data_tokenizer_test.cc holds WordPiece against: `record_wordpiece.py >wordpiece_sample.h` in an
environment with transformers.

SPDX-License-Identifier: Apache-2.0
"""
# ruff: noqa: RUF001 - letters that look alike are what is tried here

import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cafe", "café", "Cafe", "un", "##aff", "##able", "running", "run", "##ning",
         "hello", "world", "stop", "##ping", "naive", "istanbul", "strasse", "straße", "привет",
         "中", "文", "漢", "σισυφοσ", "σισυφος", "ё", "е", "##s", "don", "resume", "i", "##̇"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
MARKS = [*"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "–", "—", "…", "“", "”", "。", "§", "²"]

TEXTS = [
    "Hello, World!", "the unaffable running", "Café CAFÉ cafe\u0301", "naïve résumé Straße STRASSE",
    "İstanbul istanbul", "ΣΊΣΥΦΟΣ", "Привет Ё е", "中文漢字", "hello中文world", "don't stop-ping",
    "a\tb\nc\r\nd\u00a0e\u2003f\u2028g", "zero\u200bwidth \ufeffmark soft\u00adhyphen",
    "$5 + 2² = <x> ^_^ `q` ~ |", "“quotes” – dash — and…", "[MASK] is [CLS]x[SEP] [mask]",
    "[MASK][MASK]", "x" * 100, "x" * 101, "unaffablexyz unaff", "private \ue000 use \ufffd end",
    "", "   ", "runs 9 running9", "full。stop", "\u0378 unassigned", "H\u0338e\u0301llo",
    "a\u061db a\u2e43b", "a\u0898b a\u1734b", "a\u166db a\u1885b", "a\ua9bdb a\U000111c9b",
]


def quoted(text):
    escaped = "".join(
        chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode())
    return f'"{escaped}"'


def main():
    pieces = SPECIAL + WORDS + [x for x in LETTERS if x not in WORDS]
    pieces += ["##" + x for x in LETTERS if "##" + x not in WORDS] + MARKS
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    print("// Written by record_wordpiece.py: a vocabulary, texts, and the ids that transformers "
          f"{transformers.__version__}\n// gives them.\n"
          "// SPDX-License-Identifier: Apache-2.0\n#pragma once\n\n#include <vector>\n\n"
          "namespace lln_torch {\n\n// clang-format off\n"
          "inline const std::vector<const char*> kWordPieces = {")
    print(",\n".join("    " + quoted(piece) for piece in pieces) + "};\n")
    print("struct WordPieceSample {\n  bool lowercase;\n  bool strip_accents;\n"
          "  const char* text;\n  std::vector<int> ids;\n};\n\n"
          "inline const std::vector<WordPieceSample> kWordPieceSamples = {")
    for lowercase, accents in ((True, True), (False, False), (True, False)):
        tokenizer = transformers.BertTokenizer(
            vocab=vocabulary, do_lower_case=lowercase, strip_accents=accents)
        for text in TEXTS:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            print(f"    {{{str(lowercase).lower()}, {str(accents).lower()}, {quoted(text)},\n"
                  f"     {{{', '.join(map(str, ids))}}}}},")
    print("};\n// clang-format on\n\n}  // namespace lln_torch")


if __name__ == "__main__":
    main()
