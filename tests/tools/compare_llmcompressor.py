"""GPTQ and AWQ of llm-compressor beside `cachalot quantize`: a dense model, the same calibration text, the same file format.

  pip install llmcompressor gguf
  compare_llmcompressor.py CACHALOT MODEL SCRATCH --calib wiki=wiki/calib.txt --eval wiki=wiki/eval.txt --methods rtn,gptq,awq

MODEL is a Hugging Face directory, or a GGUF file of a Llama with a byte-level BPE of digits one by one (SmolLM2), which becomes one in
SCRATCH first. Both programs write symmetric 4-bit groups as compressed-tensors; `cachalot eval kld` measures both against the original on the
same windows. What SCRATCH has already is not made again. Nothing is downloaded.
"""

import argparse
import json
import pathlib
import subprocess
import time

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

if not torch.cuda.is_available():
    torch.Tensor.pin_memory = lambda self: self  # a build of torch with CUDA has none without a driver


def tokenizer_of_gguf(path):
    """transformers would take the model's architecture for its tokenizer's kind."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    fields = gguf.GGUFReader(path).fields
    tokens, merges, types = (fields["tokenizer.ggml." + key].contents() for key in ("tokens", "merges", "token_type"))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in zip(tokens, types) if kind == 3])
    bos, eos = (tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()] for key in ("bos", "eos"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


def as_directory(model, scratch, layers):
    out = scratch / (f"original-{layers}" if layers else "original")
    if (out / "config.json").exists():
        return out
    if layers:
        whole = as_directory(model, scratch, 0)
        AutoTokenizer.from_pretrained(whole).save_pretrained(out)
        AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=layers, dtype="auto").save_pretrained(out)
    elif model.is_dir():
        return model
    else:
        loaded = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
        del loaded.config.quantization_config  # it is dequantized by now, which save_pretrained does not see
        fresh = AutoModelForCausalLM.from_config(loaded.config).to(torch.bfloat16)
        fresh.load_state_dict(loaded.state_dict())
        tokenizer_of_gguf(model).save_pretrained(out)
        fresh.save_pretrained(out)
    return out


def windows(tokenizer, texts, tokens, length):
    """Evenly spread windows of each text, as many of each text; behind BOS if the tokenizer adds one, as Cachalot cuts them."""
    begins_with = [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]
    rows = []
    for path in texts:
        ids = tokenizer(pathlib.Path(path).read_text(), add_special_tokens=False)["input_ids"]
        available, wanted = len(ids) // length, tokens // len(texts) // length
        if available < wanted:
            raise SystemExit(f"{path}: {available} windows of {length} tokens, expected at least {wanted}")
        for i in range(wanted):
            begin = i * available // wanted * length
            rows.append({"input_ids": begins_with + ids[begin:begin + length - len(begins_with)], "attention_mask": [1] * length})
    return Dataset.from_list(rows)


def quantize_theirs(args, original, data, method, out):
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=args.group)
    scheme = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, "ignore": ["lm_head"]}
    rounding = QuantizationModifier(**scheme)
    recipe = {"rtn": [rounding], "gptq": [GPTQModifier(**scheme)], "awq": [AWQModifier(), rounding]}[method]
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=args.window, num_calibration_samples=len(data),
            output_dir=str(out))
    AutoTokenizer.from_pretrained(original).save_pretrained(out)


def quantize_ours(args, original, method, out):
    texts = [part for text in args.calib for part in ("--domain", text)]
    subprocess.run([args.cachalot, "quantize", "-m", original, "-o", out, "--format", "compressed-tensors", "--type",
                    f"int4-g{args.group}-sym", "--method", method, "--tokens", str(args.tokens), "--window", str(args.window),
                    "--eval-windows", "0", "-q", "--force", *texts], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cachalot", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("scratch", type=pathlib.Path)
    parser.add_argument("--calib", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--eval", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--methods", default="rtn,gptq,awq")
    parser.add_argument("--tokens", type=int, default=8192, help="to calibrate on")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8, help="of each text that is measured")
    parser.add_argument("--layers", type=int, default=0, help="only the first so many, to save time")
    parser.add_argument("--group", type=int, default=64)
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)

    args.cachalot = args.cachalot.resolve()
    original = as_directory(args.model, args.scratch, args.layers)
    data = windows(AutoTokenizer.from_pretrained(original), [text.split("=", 1)[1] for text in args.calib], args.tokens, args.window)
    texts = [part for text in args.eval for part in ("--domain", text)]
    print("| method | by | seconds | domain | perplexity ratio | mean KL | same first choice |\n| --- | --- | --- | --- | --- | --- | --- |")
    for method in args.methods.split(","):
        for who in "llm-compressor", "cachalot":
            out, begin = args.scratch / f"{who}-{method}{args.layers or ''}", time.time()
            if not (out / "config.json").exists():
                if who == "cachalot":
                    quantize_ours(args, original, method, out)
                else:
                    quantize_theirs(args, original, data, method, out)
            seconds = time.time() - begin
            measured = subprocess.run([args.cachalot, "eval", "kld", "-m", out, "--base-model", original, "--method", "windows", "--window",
                                       str(args.window), "--windows", str(args.windows), "--json", *texts],
                                      check=True, stdout=subprocess.PIPE, text=True).stdout
            for d in json.loads(measured)["domains"]:
                print(f"| {method} | {who} | {seconds:.0f} | {d['domain']} | {d['ppl_ratio']['value']:.4f} | {d['kl']['value']:.4f} ± "
                      f"{d['kl']['error']:.4f} | {100 * d['same_top']['value']:.1f}% |", flush=True)


if __name__ == "__main__":
    main()
