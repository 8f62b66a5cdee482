"""Writes unicode_tables.cpp. usage: python3 make_unicode_tables.py > unicode_tables.cpp

Needs the package unicodedata2 16.0.0. The reference library (Hugging Face tokenizers 0.23) splits text by the categories of Unicode 16
but normalises by Unicode 9, so marks and compositions that came later are left out.
"""
import sys

import unicodedata2 as u

assert u.unidata_version == "16.0.0", u.unidata_version
AFTER_UNICODE_9 = [
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA), (0x1715, 0x1715),
    (0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x105C9, 0x105C9), (0x105E4, 0x105E4), (0x10D24, 0x10D27), (0x10D69,
    0x10D6D), (0x10EAB, 0x10EAC), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50), (0x10F82, 0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B),
    (0x11383, 0x11383), (0x11385, 0x11385), (0x1138E, 0x1138E), (0x11391, 0x11391), (0x113C5, 0x113C5), (0x113C7, 0x113C8), (0x113CE,
    0x113D0), (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x11938, 0x11938), (0x1193D, 0x1193E), (0x11943, 0x11943), (0x119E0, 0x119E0),
    (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42), (0x11D44, 0x11D45), (0x11D97, 0x11D97), (0x11F41,
    0x11F42), (0x16121, 0x16128), (0x1612F, 0x1612F), (0x16D68, 0x16D6A), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136),
    (0x1E2AE, 0x1E2AE), (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF),
]
LATE = {c for first, last in AFTER_UNICODE_9 for c in range(first, last + 1)}
FLAGS = {"L": 1, "M": 2, "N": 4, "P": 8, "S": 16}
SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def runs(value):
    out, last = [], None
    for c in range(0x110000):
        v = value(c)
        if v != last:
            out.append(c << 8 | v)
            last = v
    return out


def array(name, comment, numbers):
    print(f"// {comment}\nconst uint32_t {name}[] = {{")
    line = "   "
    for n in numbers:
        word = f" {n:#x}," if n > 9 else f" {n},"
        if len(line) + len(word) > 138:
            print(line)
            line = "   "
        line += word
    print(f"{line}\n}};\nconst size_t {name}Size = std::size({name});\n")


categories = runs(lambda c: FLAGS.get(u.category(chr(c))[0], 0) | (32 if c in SPACES else 0))
classes = runs(lambda c: 0 if c in LATE else u.combining(chr(c)))
pairs = []
for c in range(0x110000):
    d = u.decomposition(chr(c))
    if not d or d[0] == "<" or c in LATE:
        continue
    parts = [int(x, 16) for x in d.split()]
    composes = len(parts) == 2 and u.normalize("NFC", "".join(map(chr, parts))) == chr(c)
    pairs += [c | (0 if composes else 0x80000000), parts[0], parts[1] if len(parts) == 2 else 0]

print("// Unicode data: general categories (16), combining classes, canonical decompositions (9). Made by make_unicode_tables.py.")
print("// clang-format off")
print('#include "text/unicode_tables.h"\n\n#include <iterator>\n\nnamespace cachalot::unicode {\n')
array("kCategoryRuns", "first code point << 8 | category flags, up to the next entry", categories)
array("kCombiningRuns", "first code point << 8 | canonical combining class, up to the next entry", classes)
array("kDecompositions", "triples: code point (top bit: never composed again), first part, second part or 0", pairs)
print("}  // namespace cachalot::unicode")
print(len(categories), len(classes), len(pairs), file=sys.stderr)
