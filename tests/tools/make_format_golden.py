#!/usr/bin/env python3
"""Writes testdata/format_golden.safetensors: random blocks of every GGUF type with the values that the `gguf` package decodes them to,
and values with the blocks that it encodes them to. Needs: pip install gguf numpy. The same file comes out every time.

Tensors: `<type>.blocks` U8 and `<type>.values` F32 for decoding; `encode.input` F32 and `encode.<type>` U8 for encoding;
`encode.wide_input`, with values no block scale could hold, for f16 and bf16 alone."""

import json
import pathlib
import struct
import sys

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

# Byte offsets of the f16 fields of a block.
F16_FIELDS = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ4_NL: [0], T.IQ4_XS: [0], T.MXFP4: [],
}  # fmt: skip
ENCODED = [T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0]


def random_blocks(rng, qtype, n_blocks):
    blocks = rng.integers(0, 256, (n_blocks, GGML_QUANT_SIZES[qtype][1]), dtype=np.uint8)
    for offset in F16_FIELDS[qtype]:
        scales = (rng.standard_normal(n_blocks) * 10.0 ** rng.uniform(-6, 3, n_blocks)).astype(np.float16)
        scales[0], scales[1], scales[2] = 0.0, -0.0, np.float16(6e-8)  # zeros and a subnormal
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if qtype == T.MXFP4:  # 255 is NaN in the OCP document and 2^128 in the package; files have neither
        blocks[:, 0] = rng.integers(1, 255, n_blocks)
        blocks[:3, 0] = [0, 1, 254]
    return blocks.reshape(-1)


def encoder_input(rng):
    normal = rng.standard_normal((32, 32)).astype(np.float32)
    scaled = normal[:8] * np.float32(10.0) ** rng.integers(-6, 4, (8, 1)).astype(np.float32)
    grid = rng.integers(-127, 128, (8, 32)).astype(np.float32) / 2  # many exact halves
    special = np.zeros((8, 32), np.float32)
    special[1] = 1.0
    special[2, 5], special[2, 9] = 3.0, -3.0  # the first of two equal magnitudes decides
    special[3, 5], special[3, 9] = -3.0, 3.0
    special[4] = np.arange(32)
    special[5] = -np.arange(32)
    special[6] = np.arange(32) * np.float32(1e-9)  # the f16 scale underflows
    special[7, 31] = 127.0
    special[7, :31] = np.arange(31) + 0.5
    return np.concatenate([normal, scaled, grid, special]).reshape(-1).astype(np.float32)


def wide_input(rng):
    bits = rng.integers(0, 2**32, 512, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isnan(values), np.float32(0), values)
    near_f16 = (rng.standard_normal(512) * 10.0 ** rng.uniform(-9, 5, 512)).astype(np.float32)
    edges = np.array([65504, 65519.996, 65520, -65520, 1e9, np.inf, -np.inf, 0.0, -0.0, 2**-24, 2**-25, 2.98023259e-8, 3.4e38], np.float32)
    return np.concatenate([values, near_f16, edges])


def build():
    rng = np.random.default_rng(20240807)
    tensors = {}
    for qtype in F16_FIELDS:
        small = GGML_QUANT_SIZES[qtype][0] == 32
        blocks = random_blocks(rng, qtype, 24 if small else 7)
        name = qtype.name.lower()
        tensors[name + ".blocks"] = blocks
        with np.errstate(over="ignore"):
            tensors[name + ".values"] = quants.dequantize(blocks, qtype).astype(np.float32)
    for qtype in (T.F32, T.F16, T.BF16):
        stored = rng.standard_normal(256).astype(np.float32)
        blocks = quants.quantize(stored, qtype).view(np.uint8).reshape(-1)
        tensors[qtype.name.lower() + ".blocks"] = blocks
        tensors[qtype.name.lower() + ".values"] = quants.dequantize(blocks, qtype).astype(np.float32).reshape(-1)
    tensors["encode.input"], tensors["encode.wide_input"] = encoder_input(rng), wide_input(rng)
    for qtype in ENCODED:
        with np.errstate(over="ignore"):
            tensors["encode." + qtype.name.lower()] = quants.quantize(tensors["encode.input"], qtype).view(np.uint8).reshape(-1)
            if qtype in (T.F16, T.BF16):
                tensors["encode.wide_" + qtype.name.lower()] = quants.quantize(tensors["encode.wide_input"], qtype).view(np.uint8).reshape(-1)
    return tensors


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in sorted(tensors.items(), key=lambda item: (item[1].dtype != np.float32, item[0])):
        dtype = {np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}[array.dtype]
        header[name] = {"dtype": dtype, "shape": [array.size], "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


if __name__ == "__main__":
    default = pathlib.Path(__file__).resolve().parents[2] / "testdata" / "format_golden.safetensors"
    write_safetensors(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default, build())
