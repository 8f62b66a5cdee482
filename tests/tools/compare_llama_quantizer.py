#!/usr/bin/env python3
"""Compares `cachalot quantize --type q4_k_m --imatrix` with llama.cpp's own quantizer on the same model, importance matrix and text.

usage: compare_llama_quantizer.py CACHALOT MODEL SCRATCH --calib FILE... --eval NAME=FILE... [--windows N] [--type q4_k_m]

MODEL is a safetensors folder or a GGUF file; both quantizers start from its F32 form. Theirs is the library in llama-cpp-python, so no tools
are needed. Prints a table: file size, perplexity ratio and mean KL against the original, with `eval kld --method windows`.
Exits 1 when our mean KL is larger than theirs.
Needs: pip install llama-cpp-python gguf numpy
"""
import argparse
import ctypes
import json
import pathlib
import subprocess
import sys

import gguf
import llama_cpp
import numpy as np

FILE_TYPES = {"q4_k_m": 15, "q5_k_m": 17}


def imatrix_entries(path):
    """Name to mean squares, experts one after another, as llama-quantize hands them on."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    out = {}
    for name, tensor in tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        name = name.removesuffix(".in_sum2")
        counts = np.asarray(tensors[name + ".counts"].data, dtype=np.float64).reshape(-1, 1)
        sums = np.asarray(tensor.data, dtype=np.float64).reshape(counts.shape[0], -1)
        out[name] = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0).astype(np.float32).reshape(-1)
    return out


def quantize_theirs(source, out, entries, file_type, threads):
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, file_type
    array = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))()
    for slot, (name, values) in zip(array, entries.items()):
        slot.name, slot.data, slot.size = name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), values.size
    params.imatrix = array
    # Their loader asks deepseek2 for the rank of a query latent, which models without one do not have.
    overrides = (llama_cpp.llama_model_kv_override * 2)()
    fields = gguf.GGUFReader(source).fields
    if fields["general.architecture"].contents() == "deepseek2" and "deepseek2.attention.q_lora_rank" not in fields:
        overrides[0].tag, overrides[0].key, overrides[0].value.val_i64 = 0, b"deepseek2.attention.q_lora_rank", 0
        params.kv_overrides = overrides
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) != 0:
        sys.exit("llama_model_quantize failed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cachalot", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("scratch", type=pathlib.Path)
    parser.add_argument("--calib", action="append", required=True, help="text that the importance matrix is of")
    parser.add_argument("--calib-windows", type=int, default=14, help="of 512 tokens, of each text")
    parser.add_argument("--eval", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=8, help="of each text that is measured")
    parser.add_argument("--type", choices=FILE_TYPES, default="q4_k_m")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)

    def run(*command):
        return subprocess.run([args.cachalot, *command, "-t", str(args.threads)], check=True, stdout=subprocess.PIPE, text=True).stdout

    original, imatrix = args.scratch / "f32.gguf", args.scratch / "imatrix.gguf"
    if not original.exists():
        subprocess.run([args.cachalot, "convert", "-m", args.model, "-o", original, "--type", "f32", "-q"], check=True)
    if not imatrix.exists():
        run("imatrix", "-m", original, "-o", imatrix, "--windows", str(args.calib_windows), "-q",
            *[part for text in args.calib for part in ("-f", text)])
    ours, theirs = args.scratch / "ours.gguf", args.scratch / "theirs.gguf"
    run("quantize", "-m", original, "-o", ours, "--type", args.type, "--method", "rtn", "--imatrix", imatrix, "--force", "-q")
    quantize_theirs(original, theirs, imatrix_entries(imatrix), FILE_TYPES[args.type], args.threads)

    texts = [part for text in args.eval for part in ("--domain", text)]
    print("| quantizer | file, MB | perplexity ratio | mean KL | same first choice |\n| --- | --- | --- | --- | --- |", flush=True)
    kl = {}
    for who, path in ("llama.cpp", theirs), ("`quantize --imatrix`", ours):
        measured = json.loads(run("eval", "kld", "-m", path, "--base-model", original, "--method", "windows", "--windows",
                                  str(args.windows), "--json", *texts))
        d = measured["domains"][-1]
        kl[path] = d["kl"]["value"]
        print(f"| {who} | {path.stat().st_size / 1e6:.2f} | {d['ppl_ratio']['value']:.4f} | {d['kl']['value']:.4f} ± {d['kl']['error']:.4f} | "
              f"{100 * d['same_top']['value']:.1f}% |", flush=True)
    sys.exit(1 if kl[ours] > kl[theirs] else 0)


if __name__ == "__main__":
    main()
