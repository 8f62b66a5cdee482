#!/usr/bin/env python3
"""Runs `cachalot bench` and llama.cpp on one GGUF file in alternation and prints medians and ratios.

    bench/compare_llama_cpp.py -m model.gguf --llama-bench path/to/llama-bench
    python bench/compare_llama_cpp.py -m model.gguf --python        # llama-cpp-python, of the Python that runs this script

Each round loads the model afresh in a process of its own, first ours, then the peer, so that a machine whose speed drifts is fair to
both and two models are never in memory together. What follows --peer-args goes to llama-bench as it stands (-fa 1, -mmp 0 ...), likewise
--our-args to cachalot. Batched decode has no counterpart in llama-bench: use llama-batched-bench for that.
"""
import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="GGUF file")
    parser.add_argument("--cachalot", default="build/release/bin/cachalot", help="our program [%(default)s]")
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--llama-bench", metavar="PROGRAM", help="the peer is this llama-bench")
    peer.add_argument("--python", action="store_true", help="the peer is the Python package llama-cpp-python")
    peer.add_argument("--python-peer-worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tests that read so many tokens [%(default)s]")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="tests that generate so many tokens [%(default)s]")
    parser.add_argument("-d", "--n-depth", default="0", metavar="N,..", help="tokens in the cache before [%(default)s]")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), metavar="N", help="[%(default)s]")
    parser.add_argument("-r", "--repetitions", type=int, default=1, metavar="N", help="runs of each test in a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--peer-args", default="", metavar="TEXT", help="more flags for llama-bench")
    parser.add_argument("--our-args", default="", metavar="TEXT", help="more flags for cachalot bench")
    parser.add_argument("-o", "--output", choices=["md", "json"], default="md")
    return parser.parse_args()


def numbers(text):
    return [int(part) for part in text.split(",")]


def run_json(command):
    """What a program prints, as JSON; ends the script with its message when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"compare: {shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError as error:
        sys.exit(f"compare: {shlex.join(command)} printed no JSON ({error}): {done.stdout[:400]}")


def shared_flags(args):
    return ["-m", args.model, "-p", args.n_prompt, "-n", args.n_gen, "-d", args.n_depth, "-t", str(args.threads), "-r", str(args.repetitions)]


def run_ours(args):
    return run_json([args.cachalot, "bench", *shared_flags(args), "-o", "json", "-q", *shlex.split(args.our_args)])


def run_peer(args):
    if args.python:
        return run_json([sys.executable, __file__, "--python-peer-worker", *shared_flags(args)])
    return run_json([args.llama_bench, *shared_flags(args), "-o", "json", *shlex.split(args.peer_args)])


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


def name_of(test):
    n_prompt, n_gen, n_depth = test
    return (f"pp{n_prompt}" if n_prompt else f"tg{n_gen}") + (f" @ d{n_depth}" if n_depth else "")


def collect(into, results):
    for result in results:
        into.setdefault((result["n_prompt"], result["n_gen"], result["n_depth"]), []).extend(result["samples_ts"])


def spread(samples):
    return f"{statistics.median(samples):.2f} ({min(samples):.2f}..{max(samples):.2f})"


def main():
    args = arguments()
    if args.python_peer_worker:
        python_peer_worker(args)
        return
    ours, peers, details = {}, {}, {}
    for i in range(args.rounds):
        print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
        results = run_ours(args)
        collect(ours, results)
        for result in results:
            details.setdefault((result["n_prompt"], result["n_gen"], result["n_depth"]), []).append(result)
        collect(peers, run_peer(args))
    peer = "llama-cpp-python" if args.python else "llama.cpp"
    rows = []
    for test, samples in ours.items():
        if test not in peers:
            sys.exit(f"compare: {peer} gave no result for {name_of(test)}")
        shares = [d["bound_pct"] for d in details[test] if d["bound_pct"] is not None]
        bandwidths = [d["peak_bw_gbs"] for d in details[test] if d["peak_bw_gbs"] is not None]
        rows.append({"test": name_of(test), "ours_ts": samples, "peer_ts": peers[test],
                     "ratio": statistics.median(samples) / statistics.median(peers[test]),
                     "bound_pct": statistics.median(shares) if shares else None,
                     "peak_bw_gbs": statistics.median(bandwidths) if bandwidths else None})
    if args.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print(f"| test | cachalot, tokens/s, median (min..max) | {peer} | ratio | cachalot's share of its bound | read GB/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        share = "-" if row["bound_pct"] is None else f"{row['bound_pct']:.0f}%"
        bandwidth = "-" if row["peak_bw_gbs"] is None else f"{row['peak_bw_gbs']:.1f}"
        print(f"| {row['test']} | {spread(row['ours_ts'])} | {spread(row['peer_ts'])} | {row['ratio']:.2f} | {share} | {bandwidth} |")


if __name__ == "__main__":
    main()
