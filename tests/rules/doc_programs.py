"""Writes the programs of the documents, in C++ and C, as source files, one per block, and prints
the names of the files for CMake, which builds them and has ctest run them.
`doc_programs.py ROOT FOLDER`

SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import sys

import doc_rules


def extract(root, folder):
    """Writes a file for each block and returns their names: document and line, README_42.cc."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for path, text in doc_rules.documents(root):
        for line, suffix, code in doc_rules.program_blocks(text):
            name = f"{path.removesuffix('.md').replace('/', '_')}_{line}.{suffix}"
            source = f'#line {line + 1} "{root / path}"\n{code}'
            file = folder / name
            if not file.exists() or file.read_text(encoding="utf-8") != source:
                file.write_text(source, encoding="utf-8")
            names.append(name)
    return names


if __name__ == "__main__":
    print(";".join(extract(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]))), end="")
