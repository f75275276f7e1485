"""Check the keys of a config against the releases that know them: `config/releases.py`.

    SFTConfig(max_seq_length=1024)  with trl==0.24      removed after 0.19; use max_length
    LoraConfig(lora_rnak=8)         no release of PEFT knows it

Releases are stated in the text (`trl==0.12.1`, the output of `pip list`), in another file, or by `--with`. Without a
release, only keys that no release knows are reported; the others become notes. An `adapter_config.json` may hold keys
of a fork, so there an unknown key is reported only if it is close to a known one; a Python call refuses any other.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tunewell.config.releases import Release, Versions, load_tables

_CALL = re.compile(
    r"\b(?:Seq2Seq)?(TrainingArguments|(?:SFT|DPO|GRPO|KTO|Reward|Lora)Config|(?<!Seq2Seq)(?:SFT|DPO|GRPO)?Trainer)\("
)
_IN_CALL = re.compile(r"(['\"])(?:\\[\s\S]|(?!\1)[^\\])*\1?|#.*|(\w+)\s*=(?!=)|[()\[\]{},]|[^\s'\"#()\[\]{},]+?")
"""Matches a string, a comment, the name of a keyword argument, a bracket or a comma, or another character."""
_ADAPTER = re.compile(r"""(?m)^(?:  )?["']?peft_type["']?\s*:\s*["']?LORA\b""")
_TOP_KEY = re.compile(r"(?m)^(?:  )?[\"']?([A-Za-z_]\w*)[\"']?\s*:")
_LONGEST_CALL = 20_000
_TYPO = 0.88
"""Similarity of a misspelt key."""
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "max_prompt_length": "max_length",
    "tokenizer": "processing_class",
    "dataset_text_field": "args=SFTConfig(dataset_text_field=...)",
    "packing": "args=SFTConfig(packing=...)",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
}
"""What to write instead, if the name alone does not lead there."""


@dataclass(frozen=True)
class KeyRemark:
    """A remark about a key: where it is known, and what is close to it."""

    key: str
    line: int
    note: str
    fact: str
    """The name of the fact that signatures refer to; empty if the key may be right."""


def check_keys(text: str, versions: Versions) -> Iterator[KeyRemark]:
    """Yield remarks about the keys of Python calls and of an `adapter_config.json` that their release does not know."""
    for call in _CALL.finditer(text):
        names = [call[1], *(["TrainingArguments"] if call[1].endswith("Config") and call[1] != "LoraConfig" else [])]
        keys = ((key[2], key.start(2)) for key in _keywords(text, call.end()))
        yield from _remarks(text, keys, names, versions, typo=None)
    if _ADAPTER.search(text):
        keys = ((key[1], key.start(1)) for key in _TOP_KEY.finditer(text))
        yield from _remarks(text, keys, ["LoraConfig"], versions, typo=_TYPO)


def _remarks(
    text: str, keys: Iterable[tuple[str, int]], names: list[str], versions: Versions, *, typo: float | None
) -> Iterator[KeyRemark]:
    """Yield the remarks about some keys. With `typo`, an unknown key must be this close to a known one."""
    tables = [load_tables()[name] for name in names]
    known = [key for table in tables for key in table.known(versions.get(table.library))]
    for key, at in keys:
        line = text.count("\n", 0, at) + 1
        # Where one table no longer has a key, as `SFTConfig` in TRL 0.12, another may: it is inherited.
        holders = [table for table in tables if key in table.keys]
        table = max(holders, key=lambda own: own.keys[key][1] == own.last, default=None)
        close = (
            next(iter(difflib.get_close_matches(key, known, n=1, cutoff=typo or 0.8)), None)
            if key not in known
            else key
        )
        if table is not None:
            first, last = table.keys[key]
            release = versions.get(table.library)
            begins, ends = f" from {_dotted(first)}", f" up to {_dotted(last)}"
            where = (begins if first > table.first else "") + (ends if last < table.last else "")
            instead = _RENAMED.get(key, close)
            use = f"; use `{instead}`" if instead and instead != key else ""
            note = f"{table.library} knows `{key}`{where} only"
            if release is None and last < table.last:
                yield KeyRemark(key, line, f"{note}{use}. `--with {table.library}==VERSION` checks all keys", "")
            elif release is not None and key not in known:
                fact = "adapter-newer-peft" if table.library == "peft" and first > release else "renamed-argument"
                yield KeyRemark(key, line, f"{note}, not {_dotted(release)}{use}", fact)
        elif (close or not typo) and not any(versions.get(table.library, table.first) > table.last for table in tables):
            # A release after the table may have added the key.
            note = f"no release of {tables[0].library} knows `{key}`"
            yield KeyRemark(key, line, note + (f"; did you mean `{close}`?" if close else ""), "unknown-key")


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


def _keywords(text: str, begin: int) -> Iterator[re.Match[str]]:
    """Yield the keyword arguments of a call. `begin` is behind its opening bracket."""
    depth, is_start = 1, True
    for found in _IN_CALL.finditer(text, begin, begin + _LONGEST_CALL):
        if found[2] and is_start:
            yield found
        depth += (found[0] in "([{") - (found[0] in ")]}")
        if not depth:
            return
        is_start = (depth == 1 and found[0] == ",") or (is_start and found[0].startswith("#"))
