#!/usr/bin/env python3
"""Compares our logits of a GGUF model with llama.cpp's (PyPI llama-cpp-python) on the same tokens.

usage: compare_llama_cpp.py CACHALOT MODEL.gguf TEXT [--tokens N] [--max-kl X] [--device NAME] [--as-stored]

llama.cpp rounds activations to 8 bits where weights are quantized, so that its logits carry an error of their own. Therefore it runs on a
copy of the model whose weights it has dequantized to F32 itself (with an F32 cache); --as-stored compares with the file as it is.

Prints mean and largest KL divergence (nats, llama.cpp's distribution against ours), the share of equal most likely tokens, and both
perplexities. Exits 1 when the mean KL is above --max-kl. The tokens come from `cachalot tokenize`; that llama.cpp gives the same ids is
checked too. Needs: pip install llama-cpp-python numpy safetensors
"""
import argparse
import shutil
import subprocess
import sys
import tempfile

import llama_cpp
import numpy as np
from safetensors.numpy import load_file


def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


parser = argparse.ArgumentParser()
parser.add_argument("cachalot")
parser.add_argument("model")
parser.add_argument("text", help="text file")
parser.add_argument("--tokens", type=int, default=512)
parser.add_argument("--max-kl", type=float, default=1e-3)
parser.add_argument("--device", default="cpu")
parser.add_argument("--as-stored", action="store_true")
args = parser.parse_args()

folder = tempfile.mkdtemp()
their_model = args.model
if not args.as_stored:
    their_model = f"{folder}/f32.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    if llama_cpp.llama_model_quantize(args.model.encode(), their_model.encode(), parameters) != 0:
        sys.exit("llama.cpp could not dequantize the model")

text = open(args.text, encoding="utf-8").read()[: args.tokens * 12]
f32 = llama_cpp.GGML_TYPE_F32
llama = llama_cpp.Llama(their_model, n_ctx=args.tokens, logits_all=True, verbose=False, type_k=f32, type_v=f32)
ours = subprocess.run([args.cachalot, "tokenize", "--tokenizer", args.model], input=text.encode(), capture_output=True, check=True).stdout
ids = [int(word) for word in ours.split()]
theirs = llama.tokenize(text.encode(), add_bos=False, special=False)
if ids != theirs:
    sys.exit(f"the two tokenizers differ: {len(ids)} and {len(theirs)} ids")
ids = ids[: args.tokens]

with open(f"{folder}/tokens", "w") as file:
    file.write(" ".join(map(str, ids)))
command = [args.cachalot, "eval", "logits", "--model", args.model, "--tokens", f"{folder}/tokens", "--out", f"{folder}/logits.safetensors"]
subprocess.run([*command, "--device", args.device], check=True)
p = log_softmax(load_file(f"{folder}/logits.safetensors")["logits"])
llama.eval(ids)
q = log_softmax(np.array(llama.scores[: len(ids)]))

shutil.rmtree(folder)
kl = (np.exp(q) * (q - p)).sum(axis=-1)
targets = np.array(ids[1:])
rows = np.arange(len(targets))
print(f"tokens {len(ids)}  mean KL {kl.mean():.3e}  largest {kl.max():.3e}  same top {np.mean(p.argmax(-1) == q.argmax(-1)):.4f}  "
      f"perplexity {np.exp(-p[rows, targets].mean()):.4f} (llama.cpp {np.exp(-q[rows, targets].mean()):.4f})")
if kl.mean() > args.max_kl:
    sys.exit(f"mean KL {kl.mean():.3e} is above {args.max_kl}")
