#!/usr/bin/env python3
"""Compares `cachalot imatrix`, `eval ppl` and `eval kld` with llama.cpp's own tools on the same model and text.

usage: compare_llama_tools.py CACHALOT LLAMA_BIN MODEL TEXT [--type Q4_K_M] [--chunks N] [--threads N] [--work DIR]

CACHALOT is our program, LLAMA_BIN the folder of llama-imatrix, llama-quantize and llama-perplexity, MODEL a safetensors folder. Both run on
F32 weights, since llama.cpp rounds activations to 8 bits where weights are quantized. Prints

  imatrix      sums of both: relative difference, tokens counted differently, entries that one side lacks
  quantize     llama-quantize with their file and with ours: share of equal bytes, relative difference of the weights
  base file    their and our log-probabilities of the same text
  statistics   of a quantized model, by llama-perplexity --kl-divergence and by eval kld, each on both base files

Exits 1 when the imatrix sums differ by more than 2% in the mean, or the mean KL divergences by more than 1%.
Needs: pip install gguf numpy
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGUFReader, dequantize

parser = argparse.ArgumentParser()
parser.add_argument("cachalot")
parser.add_argument("llama_bin")
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("--type", default="Q4_K_M")
parser.add_argument("--chunks", type=int, default=8)
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--work")
args = parser.parse_args()
work = args.work or tempfile.mkdtemp()
os.makedirs(work, exist_ok=True)
failed = False


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.stdout


def llama(tool, *arguments):
    return run(f"{args.llama_bin}/llama-{tool}", *arguments)


def path(name):
    return f"{work}/{name}"


def tensors(file):
    return {t.name: t for t in GGUFReader(file).tensors}


exact = ["-fa", "off", "-ctk", "f32", "-ctv", "f32", "-c", "512", "-b", "512", "-ub", "512", "-t", str(os.cpu_count() if args.threads == 0 else args.threads)]
chunks = str(args.chunks)
run(args.cachalot, "convert", "-m", args.model, "-o", path("f32.gguf"), "--type", "f32", "--force", "-q")

# ---- importance matrices ----
llama("imatrix", "-m", path("f32.gguf"), "-f", args.text, "-o", path("theirs.gguf"), "--chunks", chunks, "--no-ppl", *exact)
llama("imatrix", "--in-file", path("theirs.gguf"), "-m", path("f32.gguf"), "-o", path("theirs.dat"), "--output-format", "dat")
run(args.cachalot, "imatrix", "-m", path("f32.gguf"), "-f", args.text, "-o", path("ours.gguf"), "--windows", chunks, "--force", "-q")
run(args.cachalot, "imatrix", "--in-file", path("theirs.dat"), "-o", path("from_dat.gguf"), "--force", "-q")
theirs, ours, from_dat = tensors(path("theirs.gguf")), tensors(path("ours.gguf")), tensors(path("from_dat.gguf"))
names = sorted(n for n in theirs if n.endswith(".in_sum2"))
differences, moved, of = [], 0.0, 0.0
for name in names:
    if name not in ours:
        print("imatrix: only theirs:", name)
        continue
    counts = name.replace(".in_sum2", ".counts")
    a, b = theirs[name].data.astype(np.float64), ours[name].data.astype(np.float64)
    if a.size != b.size:
        sys.exit(f"{name}: shapes {a.shape} and {b.shape}")
    b = b.reshape(a.shape)
    moved += np.abs(theirs[counts].data - ours[counts].data).sum() / 2
    of += theirs[counts].data.sum()
    differences.append((np.abs(a - b).sum() / a.sum(), name))
print("imatrix: only ours:", [n for n in sorted(ours) if n.endswith(".in_sum2") and n not in theirs])
values = np.array([d for d, _ in differences])
print(f"imatrix: {len(values)} entries; relative difference of the sums: mean {values.mean():.2e}, median {np.median(values):.2e}, "
      f"largest {max(differences)[0]:.2e} ({max(differences)[1]}); {moved:.0f} of {of:.0f} counted tokens elsewhere")
failed |= values.mean() > 0.02
lost = []
for name in names:
    counts = name.replace(".in_sum2", ".counts")
    a = theirs[name].data / np.maximum(theirs[counts].data, 1)
    b = from_dat[name].data.reshape(a.shape) / from_dat[counts].data.reshape(-1)[0]
    seen = np.broadcast_to(theirs[counts].data > 0, a.shape)
    lost.append(np.abs(a - b)[seen].sum() / a[seen].sum())
print(f"imatrix: means of their .dat file as we read it against their GGUF file: largest relative difference {max(lost):.1e}")

# ---- llama-quantize with either ----
for which in ["theirs", "ours"]:
    llama("quantize", "--imatrix", path(which + ".gguf"), path("f32.gguf"), path(f"q_{which}.gguf"), args.type)
a, b = tensors(path("q_theirs.gguf")), tensors(path("q_ours.gguf"))
equal = total = 0
error = size = 0.0
for name, t in a.items():
    equal += int((t.data == b[name].data).sum()) if t.data.dtype == np.uint8 else 0
    total += t.data.size if t.data.dtype == np.uint8 else 0
    x, y = dequantize(t.data, t.tensor_type), dequantize(b[name].data, b[name].tensor_type)
    error += float(((x - y) ** 2).sum())
    size += float((x**2).sum())
print(f"quantize {args.type}: {100 * equal / total:.2f}% of bytes equal, relative difference of the weights {np.sqrt(error / size):.2e}")

# ---- base files ----
llama("perplexity", "-m", path("f32.gguf"), "-f", args.text, "--chunks", chunks, "--kl-divergence-base", path("theirs.kld"), *exact)
run(args.cachalot, "eval", "ppl", "-m", path("f32.gguf"), "-f", args.text, "--method", "llama", "--windows", chunks,
    "--kl-divergence-base", path("ours.kld"), "-q")


def base(file):
    data = open(file, "rb").read()
    window, vocab, n = np.frombuffer(data, np.int32, 3, 8)
    tokens = np.frombuffer(data, np.int32, window * n, 20)
    rows = np.frombuffer(data, np.uint16, offset=20 + 4 * window * n).reshape(-1, 4 + (vocab + 1) // 2 * 2)
    head = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return (window, vocab, n), tokens, head[:, :1].astype(np.float64) * rows[:, 4 : 4 + vocab] + head[:, 1:]


(head_a, tokens_a, p), (head_b, tokens_b, q) = base(path("theirs.kld")), base(path("ours.kld"))
if head_a != head_b or (tokens_a != tokens_b).any():
    sys.exit(f"base files: headers {head_a} and {head_b}, {(tokens_a != tokens_b).sum()} tokens differ")
print(f"base file: {p.shape[0]} rows of {p.shape[1]}; log p differs by {np.abs(p - q).mean():.1e} in the mean, {np.abs(p - q).max():.1e} at most")

# ---- statistics ----
llama("quantize", "--allow-requantize", path("q_theirs.gguf"), path("q_f32.gguf"), "F32")
number = r"\s*(-?[\d.]+)"
patterns = {"ppl": r"Mean PPL\(Q\)\s*:", "base_ppl": r"Mean PPL\(base\)\s*:", "log_ppl_ratio": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:",
            "kl": r"Mean\s+KLD:", "kl_median": r"Median\s+KLD:", "kl_99": r"99.0%\s+KLD:", "kl_max": r"Maximum KLD:",
            "delta_p": r"Mean\s+Δp:", "delta_p_rms": r"RMS Δp\s*:", "same_top": r"Same top p:"}
table = {}
for file in ["theirs.kld", "ours.kld"]:
    out = llama("perplexity", "-m", path("q_f32.gguf"), "--kl-divergence-base", path(file), "--kl-divergence", *exact)
    table["llama on " + file] = {k: float(re.search(v + number, out)[1]) for k, v in patterns.items()}
    d = json.loads(run(args.cachalot, "eval", "kld", "-m", path("q_f32.gguf"), "--kl-divergence-base", path(file), "--json", "-q"))["domains"][0]
    kl = d["kl_quantiles"]
    table["we on " + file] = {"ppl": d["ppl"]["value"], "base_ppl": d["base_ppl"]["value"], "log_ppl_ratio": d["log_ppl_ratio"]["value"],
                              "kl": d["kl"]["value"], "kl_median": kl["50.0%"], "kl_99": kl["99.0%"], "kl_max": kl["maximum"],
                              "delta_p": 100 * d["delta_p"]["value"], "delta_p_rms": 100 * d["delta_p_rms"]["value"],
                              "same_top": 100 * d["same_top"]["value"]}
print(f"{'statistics':22}" + "".join(f"{k:>14}" for k in patterns))
for row, figures in table.items():
    print(f"{row:22}" + "".join(f"{v:14.6f}" for v in figures.values()))
kls = [row["kl"] for row in table.values()]
failed |= max(kls) > 1.01 * min(kls)
sys.exit(1 if failed else 0)
