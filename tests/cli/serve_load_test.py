#!/usr/bin/env python3
"""bench/serve_load.py against a server of the trained tiny model: serve_load_test.py PROGRAM MODEL."""
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
import unittest
import urllib.request

SCRIPT = pathlib.Path(__file__).parents[2] / "bench" / "serve_load.py"
PROGRAM, MODEL = sys.argv[1:3]


class ServeLoad(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            cls.port = probe.getsockname()[1]
        cls.server = subprocess.Popen([PROGRAM, "serve", "-m", MODEL, "--port", str(cls.port), "--max-model-len", "256"],
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{cls.port}/health/ready"):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the server did not come up")

    @classmethod
    def tearDownClass(cls):
        cls.server.send_signal(signal.SIGTERM)
        cls.server.wait(60)

    def load(self, *flags):
        return subprocess.run([sys.executable, SCRIPT, "--port", str(self.port), "--vocab", "300", *flags], capture_output=True, text=True)

    def rows(self, *flags):
        done = self.load(*flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]

    def test_clients(self):
        rows = self.rows("--concurrency", "1,3", "--requests", "6", "--input", "20", "--output", "7")
        self.assertEqual([row[:3] for row in rows], [["1 clients", "6", "20, 7"], ["3 clients", "6", "20, 7"]])
        for row in rows:
            self.assertGreater(float(row[3]), 0)
            for cell in row[4:6]:
                p50, p90, p99 = map(float, re.fullmatch(r"([\d.]+) / ([\d.]+) / ([\d.]+)", cell).groups())
                self.assertTrue(0 < p50 <= p90 <= p99)

    def test_rate(self):
        self.assertEqual(self.rows("--rate", "50", "--requests", "5", "--input", "8", "--output", "2")[0][:3], ["50 requests/s", "5", "8, 2"])

    def test_an_answer_that_is_refused_is_told(self):
        done = self.load("--input", "1000")
        self.assertEqual(done.returncode, 1)
        self.assertIn("400", done.stderr)
        self.assertIn("context_length_exceeded", done.stderr)

    def test_no_server(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            done = self.load("--port", str(probe.getsockname()[1]))
        self.assertEqual(done.returncode, 1)
        self.assertIn("serve_load.py:", done.stderr)


unittest.main(argv=sys.argv[:1])
