#!/usr/bin/env python3
"""Measure the tables of small models in docs/quality.md: what each scheme and method costs, in KL and perplexity.

  scripts/quality.py build/release                             tiny-v2 and tiny-v3, all nine domains (about 20 minutes of one core)
  scripts/quality.py build/release --rows g128-rtn,g128-gptq   some rows
  scripts/quality.py build/release --model model.gguf          any model: groups of 64, wiki and code, less text
  scripts/quality.py build/release --list                      rows and their flags

Results are kept as JSON beside the build (BUILD/quality), so that a second call goes on where the first one ended; delete them to measure again.
Needs only Python and the repository's testdata.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
NINE = "books code docs legal legal_de legal_zh wiki wikitext2 zh".split()
# name: (scheme, method and flags as the table says them, flags, row that KL removed is counted from)
TINY = {
    "g128-rtn": ("int4 g128 zero points", "rtn", "--type int4-g128 --method rtn --span", None),
    "g128-gptq-quantized": ("int4 g128 zero points", "gptq, `--quantized-inputs`",
                            "--type int4-g128 --method gptq --quantized-inputs", "g128-rtn"),
    "g128-gptq": ("int4 g128 zero points", "gptq", "--type int4-g128 --method gptq", "g128-rtn"),
    "g128-awq-quantized": ("int4 g128 zero points", "awq, `--quantized-inputs`",
                           "--type int4-g128 --method awq --quantized-inputs", "g128-rtn"),
    "g128-awq": ("int4 g128 zero points", "awq", "--type int4-g128 --method awq", "g128-rtn"),
    "g128-awq+gptq": ("int4 g128 zero points", "awq+gptq", "--type int4-g128 --method awq+gptq", "g128-rtn"),
    "g128-awq+gptq-131072": ("int4 g128 zero points", "awq+gptq, `--tokens 131072`",
                             "--type int4-g128 --method awq+gptq --tokens 131072", "g128-rtn"),
    "g32-rtn": ("int4 g32 zero points", "rtn", "--type int4-g32 --method rtn --span", None),
    "mix-gptq": ("mix found by `--target-bits 4.6`", "gptq", "--type q4_k_m --target-bits 4.6 --method gptq", None),
    "fp8-rtn": ("fp8 128x128", "rtn", "--type fp8 --method rtn --span", None),
    "fp8-gptq": ("fp8 128x128", "gptq", "--type fp8 --method gptq", "fp8-rtn"),
    "q8_0-rtn": ("q8_0", "rtn", "--type q8_0 --method rtn", None),
}
DENSE = {
    "g64-rtn": ("int4 g64 zero points", "rtn", "--type int4-g64 --method rtn --span", None),
    "g64-gptq": ("int4 g64 zero points", "gptq", "--type int4-g64 --method gptq", "g64-rtn"),
    "g64-awq": ("int4 g64 zero points", "awq", "--type int4-g64 --method awq", "g64-rtn"),
    "g64-awq+gptq": ("int4 g64 zero points", "awq+gptq", "--type int4-g64 --method awq+gptq", "g64-rtn"),
    "q4_k_m-rtn": ("q4_k_m", "rtn, no importance", "--type q4_k_m --method rtn", None),
    "fp8-rtn": ("fp8 128x128", "rtn", "--type fp8 --method rtn --span", None),
    "fp8-gptq": ("fp8 128x128", "gptq", "--type fp8 --method gptq", "fp8-rtn"),
    "q8_0-rtn": ("q8_0", "rtn", "--type q8_0 --method rtn", None),
}


def unpacked(name, work):
    """testdata/NAME.tar.xz, unpacked once."""
    if not (work / name).exists():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "xJf", ROOT / f"testdata/{name}.tar.xz", "-C", work], check=True)
    return work / name


def texts(folder, domains, calibrates):
    flags = []
    for name in domains:
        evaluated = folder / name / "eval.txt"
        if not evaluated.exists():
            evaluated = folder / name / "wiki.test.raw"
        flags += ["--eval", f"{name}={evaluated}"]
        if calibrates:
            flags += ["--domain", f"{name}={folder / name / 'calib.txt'}"]
    return flags


def measured(args, model, out, flags, domains, tokens, windows):
    if out.exists():
        return json.loads(out.read_text())
    flags = flags.split()
    calibrates = "rtn" not in flags  # rounding to nearest: without importance
    if "--tokens" not in flags and calibrates:
        flags += ["--tokens", str(tokens)]
    command = [args.build / "bin/cachalot", "quantize", "-m", model, "--measure", "--plain", "--json", "--eval-windows", str(windows),
               "-t", str(args.threads), *flags, *texts(args.texts, domains, calibrates)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(result)
    return json.loads(result)


def print_table(args, model, rows, domains, tokens, windows):
    name = pathlib.Path(model).stem
    base = {}
    for row, (scheme, method, flags, reference) in rows.items():
        if args.rows and row not in args.rows and row not in {rows[r][3] for r in args.rows if r in rows}:
            continue
        report = measured(args, model, args.work / name / f"{row}.json", flags, domains, tokens, windows)
        loss = report["loss"][-1]
        base[row] = loss["kl_mean"]
        if len(base) == 1:
            print(f"\n{name}, original perplexity {loss['ppl_before']:.3f}, {loss['tokens']} tokens:\n\n"
                  "| scheme | method | bits / linear weight | perplexity ratio | mean KL | same first choice | KL removed |\n"
                  "| --- | --- | --- | --- | --- | --- | --- |")
        removed = f"{100 * (1 - loss['kl_mean'] / base[reference]):.1f}%" if reference else ""
        print(f"| {scheme} | {method} | {report['bits_per_linear_weight']:.3f} | {loss['ppl_ratio']:.4f} | {loss['kl_mean']:.4f} | "
              f"{100 * loss['top1_agreement']:.1f}% | {removed} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, help="build directory, with bin/cachalot")
    parser.add_argument("--model", action="append", help="a model in place of tiny-v2 and tiny-v3; may be given several times")
    parser.add_argument("--rows", type=lambda text: text.split(","), help="only these, and what they are compared with")
    parser.add_argument("--tokens", type=int, help="to calibrate on (65536; with --model 8192)")
    parser.add_argument("--windows", type=int, help="of 512 tokens of each text that is measured (8; with --model 4)")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    rows = DENSE if args.model else TINY
    if args.list:
        for name, (_, _, flags, _) in rows.items():
            print(f"{name:24} {flags}")
        return
    unknown = [name for name in args.rows or [] if name not in rows]
    if unknown:
        sys.exit(f"--rows: found {', '.join(unknown)}, expected some of {', '.join(rows)}")
    if not (args.build / "bin/cachalot").exists():
        sys.exit(f"{args.build}/bin/cachalot: not there; build it first")
    data = args.build / "quality"
    args.texts = unpacked("text", data)
    settings = (args.tokens or (8192 if args.model else 65536), args.windows or (4 if args.model else 8))
    args.work = data / "{}x{}".format(*settings)
    for model in args.model or [unpacked("tiny-v2", data), unpacked("tiny-v3", data)]:
        print_table(args, model, rows, ["wiki", "code"] if args.model else NINE, *settings)


if __name__ == "__main__":
    main()
