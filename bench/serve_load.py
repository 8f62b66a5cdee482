#!/usr/bin/env python3
"""Load on a running server: how long answers' first tokens and the gaps between tokens take, and how many tokens a second all get.

Random token ids as prompts, `/v1/completions` streamed, answers of a fixed length; standard library only.

  cachalot serve model.gguf --device cuda --port 8000 &
  serve_load.py --concurrency 8,64 --input 1024 --output 256               # so many clients, each asks again when it is answered
  serve_load.py --rate 4,16 --requests 200 --input 1024 --output 128       # requests at random moments, so many a second
"""
import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.request


async def request(args, prompt):
    """One streamed answer: the times (s) of its start and of each event with text, and how many tokens the server counted."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(args.host, args.port)
    body = json.dumps({"model": args.model, "prompt": prompt, "max_tokens": args.output, "temperature": args.temperature, "ignore_eos": True,
                       "stream": True, "stream_options": {"include_usage": True}}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode(errors="replace"))
    times, n_tokens = [], 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        times.append(time.perf_counter())
        if b'"usage":{' in line or b'"error":' in line:  # the last event; the others are not parsed, which would cost this program more than the server
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(line.decode(errors="replace"))
            n_tokens = event["usage"]["completion_tokens"]
            times.pop()
    writer.close()
    return start, times, n_tokens


def percentiles(values):
    """p50, p90, p99 in ms of times in s."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    times = [cuts[i - 1] * 1e3 for i in (50, 90, 99)]
    return " / ".join(f"{ms:.1f}" if ms >= 1 else f"{ms:.3f}" for ms in times)  # tokens that come together are microseconds apart


async def load(args, concurrency, rate, n_requests, seed):
    rng = random.Random(seed)  # of each test its own, so that no prompt is in the server's cache
    prompts = [[rng.randrange(3, args.vocab - 1) for _ in range(args.input)] for _ in range(n_requests)]
    begin = time.perf_counter()
    if rate:
        async def later(prompt, delay):
            await asyncio.sleep(delay)
            return await request(args, prompt)
        moment, tasks = 0.0, []
        for prompt in prompts:
            tasks.append(later(prompt, moment))
            moment += rng.expovariate(rate)
        answers = await asyncio.gather(*tasks)
    else:
        waiting, answers = iter(prompts), []

        async def client():
            for prompt in waiting:
                answers.append(await request(args, prompt))
        await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = time.perf_counter() - begin
    first = [times[0] - start for start, times, _ in answers]
    gaps = [b - a for _, times, _ in answers for a, b in zip(times, times[1:])]
    n_tokens = sum(n for _, _, n in answers)
    print(f"| {f'{rate:g} requests/s' if rate else f'{concurrency} clients'} | {n_requests} | {args.input}, {args.output} | {n_tokens / seconds:.0f} | "
          f"{percentiles(first)} | {percentiles(gaps)} | {max(gaps) * 1e3:.0f} |", flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--host", default="127.0.0.1")
    ap.add_argument("--port", type=int, default=8000)
    ap.add_argument("--model", default="", help="name to ask for [whatever is served]")
    ap.add_argument("--concurrency", default="8", help="clients, several with commas between")
    ap.add_argument("--rate", help="requests a second instead, several with commas between")
    ap.add_argument("--requests", type=int, help="of each test [four for each client; 100 with --rate]")
    ap.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    ap.add_argument("--output", type=int, default=256, help="tokens of an answer")
    ap.add_argument("--vocab", type=int, default=102400, help="token ids below this")
    ap.add_argument("--temperature", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    if not args.model:
        with urllib.request.urlopen(f"http://{args.host}:{args.port}/v1/models") as answer:
            args.model = json.load(answer)["data"][0]["id"]
    print("| load | requests | tokens in, out | tokens/s out | first token, ms, p50 / p90 / p99 | next token, ms, p50 / p90 / p99 | longest gap, ms |\n" + "| --- " * 7 + "|")
    for i, value in enumerate((args.rate or args.concurrency).split(",")):
        clients, rate = (0, float(value)) if args.rate else (int(value), 0.0)
        asyncio.run(load(args, clients, rate, args.requests or (100 if rate else 4 * clients), 1000 * args.seed + i))


try:
    main()
except (OSError, RuntimeError) as error:
    sys.exit(f"serve_load.py: {error}")
