"""Writes unicode_tables.cpp from Python's own Unicode data (run with a Python whose unicodedata is version 14, as Oniguruma 6.9.8's is).

usage: python3 make_unicode_tables.py > unicode_tables.cpp
"""
import sys
import unicodedata as u

assert u.unidata_version == "14.0.0", u.unidata_version
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
classes = runs(lambda c: u.combining(chr(c)))
pairs = []
for c in range(0x110000):
    d = u.decomposition(chr(c))
    if not d or d[0] == "<":
        continue
    parts = [int(x, 16) for x in d.split()]
    composes = len(parts) == 2 and u.normalize("NFC", "".join(map(chr, parts))) == chr(c)
    pairs += [c | (0 if composes else 0x80000000), parts[0], parts[1] if len(parts) == 2 else 0]

print("// Unicode 14 data: general categories, combining classes, canonical decompositions. Made by make_unicode_tables.py.")
print("// clang-format off")
print('#include "text/unicode_tables.h"\n\n#include <iterator>\n\nnamespace cachalot::unicode {\n')
array("kCategoryRuns", "first code point << 8 | category flags, up to the next entry", categories)
array("kCombiningRuns", "first code point << 8 | canonical combining class, up to the next entry", classes)
array("kDecompositions", "triples: code point (top bit: never composed again), first part, second part or 0", pairs)
print("}  // namespace cachalot::unicode")
print(len(categories), len(classes), len(pairs), file=sys.stderr)
