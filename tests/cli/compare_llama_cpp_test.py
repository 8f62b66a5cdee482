#!/usr/bin/env python3
"""bench/compare_llama_cpp.py beside programs that print what the real ones print: which tests meet which, medians, ratios, flags."""
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).parents[2] / "bench" / "compare_llama_cpp.py"

# Our program: one decode test at two depths, or batches; the second call of a kind is faster than the first.
OURS = """
seen = state("ours " + ("npl" if "-npl" in args else "single"))
bound = {"bound_pct": 80.0, "peak_bw_gbs": 60.0}
rows = [(0, 64, 0, 1, 20.0), (0, 64, 4096, 1, 16.0)]
if "-npl" in args:
    rows = [(0, int(flag("-n")), int(flag("-d")), int(n), 10.0 * int(n)) for n in flag("-npl").split(",")]
print(json.dumps([{"n_prompt": p, "n_gen": n, "n_depth": d, "n_seqs": s, "samples_ts": [ts + seen], **bound} for p, n, d, s, ts in rows]))
"""
LLAMA_CPP = """
if "--help" in args:
    print("  -d, --n-depth <n>")
else:
    print(json.dumps([{"n_prompt": 0, "n_gen": 64, "n_depth": d, "samples_ts": [10.0]} for d in (0, 4096)]))
"""
IK = """
if "--help" in args:
    print("  -gp <pp,tg>")
    sys.exit(1)
pp, tg = flag("-gp").split(",")
print(json.dumps([{"n_prompt": 0, "n_gen": int(flag("-n")), "samples_ts": [5.0], "test": "tg64"},
                  {"n_prompt": int(pp), "n_gen": int(tg), "samples_ts": [4.0], "test": f"tg{tg}@pp{pp}"}]))
"""
BATCHED = """
print("llama_batched_bench: n_kv_max = 1234", file=sys.stderr)
print("|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |")
print("|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|")
for n in flag("-npl").split(","):
    print(f"|   {flag('-npp')} |     {flag('-ntg')} |    {n} |    640 |    1.000 |   500.00 |    2.000 |    {2 * int(n)}.50 |    3.000 |   200.00 |")
"""
PREFIX = """#!{python}
import json, pathlib, sys
args = sys.argv[1:]
log = pathlib.Path(__file__).with_name("calls")
def flag(name):
    return args[args.index(name) + 1]
def state(what):
    seen = log.read_text().splitlines().count(what) if log.exists() else 0
    with log.open("a") as f:
        print(what, file=f)
    return seen
with log.with_name("order").open("a") as f:
    print(pathlib.Path(__file__).name, *args, file=f)
"""


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, body in {"ours": OURS, "llama": LLAMA_CPP, "ik": IK, "batched": BATCHED, "fails": "sys.exit('no such model')"}.items():
            path = self.folder / name
            path.write_text(PREFIX.format(python=sys.executable) + body)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def compare(self, *flags):
        command = [sys.executable, SCRIPT, "-m", "m.gguf", "--cachalot", self.folder / "ours", *flags]
        return subprocess.run([os.fspath(part) for part in command], capture_output=True, text=True, check=False)

    def test_two_peers_at_two_depths(self):
        done = self.compare("--llama-bench", f"llama.cpp={self.folder}/llama", "--llama-bench", f"ik={self.folder}/ik", "-p", "0", "-n", "64", "-d",
                            "0,4096", "--rounds", "3", "--our-model", "m.pack", "--peer-args=ik=-mla 3", "--peer-args=-fa 1", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = {row["test"]: row for row in json.loads(done.stdout)}
        self.assertEqual(list(rows), ["tg64", "tg64 @ d4096"])
        self.assertEqual(rows["tg64"]["ours_ts"], [20.0, 21.0, 22.0])
        self.assertEqual(rows["tg64"]["bound_pct"], 80.0)
        self.assertEqual(rows["tg64"]["peers"]["llama.cpp"], {"ts": [10.0] * 3, "ratio": 2.1})
        self.assertEqual(rows["tg64 @ d4096"]["peers"]["ik"], {"ts": [4.0] * 3, "ratio": 17.0 / 4.0})
        calls = [line.split() for line in (self.folder / "order").read_text().splitlines() if "--help" not in line]
        self.assertEqual([call[0] for call in calls], ["ours", "llama", "ik"] * 3)
        self.assertIn("m.pack", calls[0])
        self.assertIn("m.gguf", calls[1])
        self.assertNotIn("-mla", calls[1])
        self.assertNotIn("-d", calls[2])
        self.assertEqual(calls[2][-4:], ["-mla", "3", "-fa", "1"])

    def test_batches(self):
        done = self.compare("--batched-bench", f"ik={self.folder}/batched", "-p", "0", "-n", "0", "-npl", "4,16", "--rounds", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.splitlines()[2:],
                         ["| tg32 @ d128, 4 sequences | 40.00 (40.00..40.00) | 80% | 60.0 | 8.50 (8.50..8.50) | 4.71 |",
                          "| tg32 @ d128, 16 sequences | 160.00 (160.00..160.00) | 80% | 60.0 | 32.50 (32.50..32.50) | 4.92 |"])

    def test_a_test_without_a_counterpart(self):
        done = self.compare("--llama-bench", self.folder / "llama", "-p", "0", "-n", "64", "-npl", "8", "--rounds", "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.splitlines()[-1], "| tg32 @ d128, 8 sequences | 80.00 (80.00..80.00) | 80% | 60.0 | - | - |")

    def test_errors(self):
        failed = self.compare("--llama-bench", self.folder / "fails", "--rounds", "1")
        self.assertEqual(failed.returncode, 1)
        self.assertIn("ended with 1:\nno such model", failed.stderr)
        self.assertIn("-npl", self.compare("--batched-bench", self.folder / "batched").stderr)
        self.assertIn("give peers", self.compare().stderr)


if __name__ == "__main__":
    unittest.main()
