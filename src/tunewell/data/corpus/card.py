"""The page that lies in a corpus and tells a person what it is."""

from tunewell.core.units import count, percent
from tunewell.records.manifest import Manifest

_USE = """
## Use

```python
import tunewell

corpus = tunewell.open_corpus("corpus")  # documents; their labels are -100 where nothing is learned
dataset = corpus.as_dataset()            # packed sequences, a datasets.Dataset; also corpus.held_out.as_dataset()
```

Without tunewell: `datasets.load_from_disk("corpus")["train"]`. TRL trains on the sequences as they are with these
settings; with its defaults it would cut those over 1,024 tokens and let documents see each other:

```python
import torch
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

config = SFTConfig(
    padding_free=True,  # documents stay apart: positions begin again at each of them
    max_length=None,    # nothing is cut
    packing=False,      # they are packed already
    dataset_kwargs={"skip_prepare_dataset": True},
    bf16=torch.cuda.is_available(),
)
tokenizer = AutoTokenizer.from_pretrained("corpus/tokenizer")
trainer = SFTTrainer(model, args=config, train_dataset=dataset, processing_class=tokenizer)
```
"""


def data_card(manifest: Manifest) -> str:
    """Write the data card in Markdown; equal manifests give equal cards."""
    packing, tokens, lengths = manifest.packing, manifest.tokens, manifest.lengths
    template = ", ".join(dict.fromkeys(record.name for record in manifest.templates)) or "none"
    lines = [
        "# A corpus for fine-tuning",
        "",
        f"Made by {manifest.made_by} with the tokenizer of `{manifest.tokenizer.source}` and the template {template}.",
        "",
        "| | |",
        "|---|---|",
        f"| training documents | {count(manifest.documents)} |",
        f"| held-out documents | {count(manifest.held_out)} |",
        f"| sequences | {count(packing.sequences)} of {count(packing.context_length)} tokens, "
        f"{percent(packing.efficiency)} full |",
        f"| learned tokens | {count(tokens.supervised)} of {count(tokens.supervised + tokens.context)} |",
        f"| document length | mean {lengths.mean:.0f}, median {lengths.median:.0f}, p95 {lengths.p95:.0f}, "
        f"p99 {lengths.p99:.0f}, longest {count(lengths.max)} |",
        *_extra_rows(manifest),
        "",
        "## Ledger",
        "",
        "Every row that was read is a document, held out, or dropped for one reason; `dropped.jsonl` names each one.",
        "",
        "| source | rows | documents | held out | dropped |",
        "|---|---:|---:|---:|---|",
    ]
    for source in manifest.sources:
        dropped = ", ".join(f"{count(number)} {reason}" for reason, number in sorted(source.dropped.items())) or "0"
        numbers = (count(number) for number in (source.rows, source.documents, source.held_out))
        lines.append(f"| `{source.name}` | {' | '.join(numbers)} | {dropped} |")
    return "\n".join(lines) + "\n" + _USE


def _extra_rows(manifest: Manifest) -> list[str]:
    extra = {
        "pieces, added by splitting long documents": manifest.pieces,
        "repeats, added to give each source its share": manifest.repeats,
    }
    return [f"| {what} | {count(number)} |" for what, number in extra.items() if number]
