#!/usr/bin/env python3
"""Runs `cachalot bench` and its peers on one GGUF file in alternation and prints medians and ratios.

    bench/compare_llama_cpp.py -m model.gguf --llama-bench path/to/llama-bench
    bench/compare_llama_cpp.py -m model.gguf --our-model model.pack --llama-bench llama.cpp=a/llama-bench --llama-bench ik=b/llama-bench \\
        --peer-args=ik='-mla 3 -fa 1 -fmoe 1 -rtr 1' -npl 4,8 --batched-bench llama.cpp=a/llama-batched-bench
    python bench/compare_llama_cpp.py -m model.gguf --python        # llama-cpp-python, of the Python that runs this script

Each round loads the model afresh in a process of its own, first ours, then each peer, so that a machine whose speed drifts is fair to
all and two models are never in memory together. What follows --peer-args goes to llama-bench as it stands (-fa 1, -mmp 0 ...), likewise
--batched-args to llama-batched-bench and --our-args to cachalot. ik_llama.cpp's llama-bench knows no -d; its -gp is used where the help
text has it.
"""
import argparse
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="GGUF file")
    parser.add_argument("--our-model", metavar="FILE", help="what cachalot opens: a packed file of the same model [the GGUF file]")
    parser.add_argument("--cachalot", default="build/release/bin/cachalot", help="our program [%(default)s]")
    parser.add_argument("--llama-bench", metavar="[NAME=]PROGRAM", action="append", default=[], help="a peer; may be given several times")
    parser.add_argument("--batched-bench", metavar="[NAME=]PROGRAM", action="append", default=[],
                        help="that peer's llama-batched-bench, for -npl")
    parser.add_argument("--python", action="store_true", help="the peer is the Python package llama-cpp-python")
    parser.add_argument("--python-peer-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tests that read so many tokens [%(default)s]")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="tests that generate so many tokens [%(default)s]")
    parser.add_argument("-d", "--n-depth", default="0", metavar="N,..", help="tokens in the cache before [%(default)s]")
    parser.add_argument("-npl", "--n-parallel", default="", metavar="N,..", help="tests in which so many sequences generate at once [none]")
    parser.add_argument("--batched-depth", type=int, default=128, metavar="N", help="tokens of each of them in the cache before [%(default)s]")
    parser.add_argument("--batched-gen", type=int, default=32, metavar="N", help="tokens that each of them generates [%(default)s]")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), metavar="N", help="[%(default)s]")
    parser.add_argument("-r", "--repetitions", type=int, default=1, metavar="N", help="runs of each test in a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--peer-args", default=[], metavar="[NAME=]TEXT", action="append", help="more flags for llama-bench, of that peer or of all")
    parser.add_argument("--batched-args", default=[], metavar="[NAME=]TEXT", action="append", help="more flags for llama-batched-bench, likewise")
    parser.add_argument("--our-args", default="", metavar="TEXT", help="more flags for cachalot bench")
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    args = parser.parse_args()
    if bool(args.llama_bench or args.batched_bench) == (args.python or args.python_peer_worker):
        parser.error("give peers either as --llama-bench and --batched-bench or as --python")
    if args.batched_bench and not args.n_parallel:
        parser.error("--batched-bench wants sizes of batches: -npl 4,8")
    return args


def numbers(text):
    return [int(part) for part in text.split(",")]


def run(command):
    """What a program prints on both its outputs; ends the script with its message when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare: {shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout, done.stderr


def run_json(command):
    printed, _ = run(command)
    try:
        return json.loads(printed)
    except json.JSONDecodeError as error:
        sys.exit(f"compare: {shlex.join(command)} printed no JSON ({error}): {printed[:400]}")


def shared_flags(args, model):
    return ["-m", model, "-p", args.n_prompt, "-n", args.n_gen, "-d", args.n_depth, "-t", str(args.threads), "-r", str(args.repetitions)]


def wants_single(args):
    return numbers(args.n_prompt) != [0] or numbers(args.n_gen) != [0]


class Cachalot:
    name = "cachalot"

    def __init__(self, args):
        self.args, self.model, self.extra = args, args.our_model or args.model, shlex.split(args.our_args)

    def single(self):
        return run_json([self.args.cachalot, "bench", *shared_flags(self.args, self.model), "-o", "json", "-q", *self.extra])

    def batched(self):
        return run_json([self.args.cachalot, "bench", "-m", self.model, "-p", "0", "-n", str(self.args.batched_gen),
                         "-d", str(self.args.batched_depth), "-npl", self.args.n_parallel, "-t", str(self.args.threads),
                         "-r", str(self.args.repetitions), "-o", "json", "-q", *self.extra])


class LlamaCpp:
    """llama.cpp's own programs, or those of a fork."""

    def __init__(self, args, name, bench, batched_bench):
        self.args, self.name, self.bench, self.batched_bench = args, name, bench, batched_bench
        self.extra = extra_flags(args.peer_args, name)
        self.batched_extra = extra_flags(args.batched_args, name)
        self.knows_depth = True
        if bench:
            help_text = subprocess.run([bench, "--help"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
            self.knows_depth = "--n-depth" in help_text

    def single(self):
        if not self.bench:
            return []
        if self.knows_depth:
            return run_json([self.bench, *shared_flags(self.args, self.args.model), "-o", "json", *self.extra])
        return run_json([self.bench, *self.flags_without_depth(), "-o", "json", *self.extra])

    def flags_without_depth(self):
        """Depths by -gp PROMPT,N: reads so many tokens, then times the generation of N."""
        flags = ["-m", self.args.model, "-t", str(self.args.threads), "-r", str(self.args.repetitions)]
        at_start = 0 in numbers(self.args.n_depth)
        flags += ["-p", self.args.n_prompt if at_start else "0", "-n", self.args.n_gen if at_start else "0"]
        for depth in numbers(self.args.n_depth):
            for n_gen in numbers(self.args.n_gen):
                if depth > 0 and n_gen > 0:
                    flags += ["-gp", f"{depth},{n_gen}"]
        return flags

    def batched(self):
        if not self.batched_bench:
            return []
        args, most = self.args, max(numbers(self.args.n_parallel))
        # One row of cache more for each sequence: some versions count their warm-up's.
        context = most * (args.batched_depth + args.batched_gen + 1)
        results = []
        for _ in range(args.repetitions):
            printed = run([self.batched_bench, "-m", args.model, "-c", str(-(-context // 256) * 256), "-npp", str(args.batched_depth),
                           "-ntg", str(args.batched_gen), "-npl", args.n_parallel, "-t", str(args.threads), *self.batched_extra])
            results += batched_results("\n".join(printed))
        return results


class LlamaCppPython:
    name = "llama-cpp-python"

    def __init__(self, args):
        self.args = args

    def single(self):
        return run_json([sys.executable, __file__, "--python-peer-worker", *shared_flags(self.args, self.args.model)])

    def batched(self):
        return []


def batched_results(printed):
    """The rows of llama-batched-bench's table: | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |"""
    results = []
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 10 and all(re.fullmatch(r"[0-9.]+", cell) for cell in cells):
            results.append({"n_prompt": 0, "n_gen": int(cells[1]), "n_depth": int(cells[0]), "n_seqs": int(cells[2]),
                            "samples_ts": [float(cells[7])]})
    return results


def named(text, default):
    """NAME=REST as a pair; a text whose first part is no name, like a path or a flag, is all rest."""
    match = re.fullmatch(r"([\w.+-]+)=(.*)", text, re.DOTALL)
    if not match or match[1].startswith("-"):
        return default, text
    return match[1], match[2]


def extra_flags(texts, peer):
    flags = []
    for text in texts:
        name, rest = named(text, peer)
        if name == peer:
            flags += shlex.split(rest)
    return flags


def peers_of(args):
    if args.python:
        return [LlamaCppPython(args)]
    benches = dict(named(text, "llama.cpp") for text in args.llama_bench)
    batched = dict(named(text, "llama.cpp") for text in args.batched_bench)
    return [LlamaCpp(args, name, benches.get(name), batched.get(name)) for name in dict.fromkeys([*benches, *batched])]


def python_peer_worker(args):
    """Times llama-cpp-python as llama-bench would: random tokens, a warm-up, an empty cache or one of n_depth tokens before each run."""
    from llama_cpp import Llama

    prompts, gens, depths = numbers(args.n_prompt), numbers(args.n_gen), numbers(args.n_depth)
    # An evaluation of single tokens needs their logits as the next choice would; n_batch rows are what one step takes.
    model = Llama(args.model, n_ctx=max(prompts + gens) + max(depths) + 1, n_threads=args.threads, n_threads_batch=args.threads, n_batch=512,
                  n_ubatch=512, verbose=False)
    source = random.Random(42)
    some_tokens = lambda n: [source.randrange(model.n_vocab()) for _ in range(n)]

    def at_depth(depth):
        model.reset()
        if depth > 0:
            model.eval(some_tokens(depth))

    results = []
    for depth in depths:
        for n_prompt, n_gen in [(n, 0) for n in prompts if n > 0] + [(0, n) for n in gens if n > 0]:
            at_depth(0)
            model.eval(some_tokens(max(1, n_prompt)))
            samples = []
            for _ in range(args.repetitions):
                at_depth(depth)
                start = time.perf_counter()
                if n_prompt > 0:
                    model.eval(some_tokens(n_prompt))
                for _ in range(n_gen):
                    model.eval(some_tokens(1))
                samples.append((n_prompt + n_gen) / (time.perf_counter() - start))
            results.append({"n_prompt": n_prompt, "n_gen": n_gen, "n_depth": depth, "samples_ts": samples})
    print(json.dumps(results))


def key_of(result):
    # ik_llama.cpp's -gp gives the depth as n_prompt, and its name says so.
    if "@pp" in result.get("test", ""):
        return 0, result["n_gen"], result["n_prompt"], 1
    return result["n_prompt"], result["n_gen"], result.get("n_depth", 0), result.get("n_seqs", 1)


def name_of(test):
    n_prompt, n_gen, n_depth, n_seqs = test
    return (f"pp{n_prompt}" if n_prompt else f"tg{n_gen}") + (f" @ d{n_depth}" if n_depth else "") + (f", {n_seqs} sequences" if n_seqs > 1 else "")


def collect(into, results):
    for result in results:
        into.setdefault(key_of(result), []).extend(result["samples_ts"])


def spread(samples):
    return f"{statistics.median(samples):.2f} ({min(samples):.2f}..{max(samples):.2f})"


def median_of(results, field):
    values = [result[field] for result in results if result[field] is not None]
    return statistics.median(values) if values else None


def measure(args, peers):
    """One row for each test: our samples, the peers' and the ratios of the medians."""
    ours, theirs, details = {}, {peer.name: {} for peer in peers}, {}
    kinds = (["single"] if wants_single(args) else []) + (["batched"] if args.n_parallel else [])
    cachalot = Cachalot(args)
    for i in range(args.rounds):
        print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
        for kind in kinds:
            results = getattr(cachalot, kind)()
            collect(ours, results)
            for result in results:
                details.setdefault(key_of(result), []).append(result)
            for peer in peers:
                collect(theirs[peer.name], getattr(peer, kind)())
    rows = []
    for test, samples in ours.items():
        row = {"test": name_of(test), "ours_ts": samples, "bound_pct": median_of(details[test], "bound_pct"),
               "peak_bw_gbs": median_of(details[test], "peak_bw_gbs"), "peers": {}}
        for peer in peers:
            peer_samples = theirs[peer.name].get(test)
            if peer_samples:
                row["peers"][peer.name] = {"ts": peer_samples, "ratio": statistics.median(samples) / statistics.median(peer_samples)}
        rows.append(row)
    return rows


def table(rows, peers):
    lines = ["| test | cachalot, tokens/s, median (min..max) | share of its bound | read GB/s |" + "".join(f" {peer.name} | ratio |" for peer in peers),
             "| --- | ---: | ---: | ---: |" + " ---: | ---: |" * len(peers)]
    for row in rows:
        share = "-" if row["bound_pct"] is None else f"{row['bound_pct']:.0f}%"
        bandwidth = "-" if row["peak_bw_gbs"] is None else f"{row['peak_bw_gbs']:.1f}"
        line = f"| {row['test']} | {spread(row['ours_ts'])} | {share} | {bandwidth} |"
        for peer in peers:
            found = row["peers"].get(peer.name)
            line += f" {spread(found['ts'])} | {found['ratio']:.2f} |" if found else " - | - |"
        lines.append(line)
    return "\n".join(lines)


def main():
    args = arguments()
    if args.python_peer_worker:
        python_peer_worker(args)
        return
    peers = peers_of(args)
    rows = measure(args, peers)
    print(json.dumps(rows, indent=2) if args.output == "json" else table(rows, peers))


if __name__ == "__main__":
    main()
