"""Measure `tunewell serve` under attack: answers of 20 honest clients with and without 1,050 hostile connections.

    python benchmarks/serve_under_attack.py --rounds 3

1,000 slow clients send half a head and then a byte a second; 50 announce a body of 200 MB and send it slowly. All of
them connect again when they are closed. Each round measures the honest clients alone, attacked, and alone again. The
model is a random Llama of 0.3M parameters. Bar: at least half of the undisturbed rate.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from setting import setting, table

TESTS = Path(__file__).resolve().parents[1] / "tests"
NUM_SLOW, NUM_LARGE, NUM_HONEST = 1000, 50, 20
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def write_model(folder: Path) -> Path:
    """Write a random model with a tokenizer and a chat template."""
    sys.path[:0] = [str(TESTS), str(TESTS / "data")]
    import torch
    from tiny import write_tiny_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    write_tiny_model(folder)
    config = LlamaConfig(
        vocab_size=520,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def attack(host: str, port: int, stop: "multiprocessing.synchronize.Event", counts: "multiprocessing.Array") -> None:
    """Hold hostile connections until told to stop."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))

    async def hostile(head: bytes, drip: bytes, pause: float) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(host, port)
                counts[0] += 1
                writer.write(head)
                while not stop.is_set() and not reader.at_eof() and not writer.is_closing():
                    writer.write(drip)
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        if await asyncio.wait_for(reader.read(4096), pause) == b"":
                            break
                writer.close()
            await asyncio.sleep(0.5)

    async def everyone() -> None:
        large = HALF + b"Content-Length: 200000000\r\n\r\n"
        slow = [hostile(HALF[:60], b"x", 1.0) for _ in range(NUM_SLOW)]
        await asyncio.gather(*slow, *(hostile(large, b"y" * 16_384, 0.2) for _ in range(NUM_LARGE)))

    asyncio.run(everyone())


def answers(url: str, seconds: float) -> tuple[float, int, float]:
    """Return answers per second of the honest clients, the number of failures, and the longest wait."""
    body = {"model": "model", "messages": [{"role": "user", "content": "How are you today?"}], "max_tokens": 24}
    until, done, failed, waits = time.monotonic() + seconds, [0], [0], [0.0]
    lock = threading.Lock()

    def client() -> None:
        while time.monotonic() < until:
            request = urllib.request.Request(
                f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            started = time.monotonic()
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    response.read()
                is_ok = True
            except OSError:
                is_ok = False
            with lock:
                done[0] += is_ok
                failed[0] += not is_ok
                waits[0] = max(waits[0], time.monotonic() - started)

    began = time.monotonic()
    clients = [threading.Thread(target=client) for _ in range(NUM_HONEST)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    return done[0] / (time.monotonic() - began), failed[0], waits[0]


def main() -> None:
    """Measure rounds of quiet, attacked, quiet, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        command = [sys.executable, "-m", "tunewell", "serve", str(model), "--port", "0", "--json", "--device", "cpu"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            info = json.loads(server.stdout.readline())
            where = urlsplit(info["url"])
            answers(info["url"], 3)
            rows, ratios = [], []
            for number in range(options.rounds):
                before = answers(info["url"], options.seconds)
                stop, counts = multiprocessing.Event(), multiprocessing.Array("l", 1)
                attacker = multiprocessing.Process(target=attack, args=(where.hostname, where.port, stop, counts))
                attacker.start()
                time.sleep(4)
                attacked = answers(info["url"], options.seconds)
                stop.set()
                attacker.join(20)
                if attacker.is_alive():
                    attacker.kill()
                time.sleep(1)
                after = answers(info["url"], options.seconds)
                quiet = (before[0] + after[0]) / 2
                ratios.append(attacked[0] / quiet)
                status = Path(f"/proc/{server.pid}/status").read_text()
                memory = int(status.split("VmRSS:")[1].split()[0]) // 1024
                rows.append(
                    [
                        str(number + 1),
                        f"{before[0]:.1f}, {after[0]:.1f}",
                        f"{attacked[0]:.1f}",
                        f"{ratios[-1]:.2f}",
                        f"{before[1] + after[1]}, {attacked[1]}",
                        f"{max(before[2], after[2]):.1f}, {attacked[2]:.1f}",
                        f"{counts[0]:,}",
                        str(memory),
                    ]
                )
                print(" ".join(rows[-1]), flush=True)
        finally:
            server.terminate()
            server.wait(20)
    print(setting("uvicorn", "h11", "torch", "tunewell"))
    names = ["round", "alone, answers/s", "attacked", "ratio", "failures alone, attacked", "longest wait, s"]
    print(table([*names, "hostile connections made", "server MiB"], rows))
    print(f"\nMedian ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); bar 0.5.")


if __name__ == "__main__":
    main()
