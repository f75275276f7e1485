"""What a log says of the run beside its numbers: the device, the precision, the vocabulary."""

import re

from tunewell.training.readings import About

_APPLE = re.compile(
    r"\bmps\b(?!['\"]?(?: is)?(?: available)?['\"]?\s*[:=]\s*(?:false|no\b))|Apple (?:silicon|GPU|M[1-9])"
    r"|\bM[1-9] (?:Pro|Max|Ultra)\b|\bM[1-9]\b.{0,80}(?:Mac|MPS|Apple)",
    re.I,
)
_MAC = re.compile(r"Mac ?Book|\biMac\b|\bMac (?:Studio|mini|Pro)\b", re.I)
_NVIDIA = re.compile(r"cuda|nvidia|\b[RG]TX\b|\b[AHTLV]\d{1,3}\b", re.I)
_IS_ON = r"\b['\"]?(?!['\"]?(?:\s*[:=]\s*|\s+)['\"]?(?:false|no\b|none|null|0))"
_PRECISIONS = (
    (
        "fp16",
        re.compile(rf"\b(?:fp16|float16){_IS_ON}|torch\.half\b|\.half\(\)|dtype['\"]?\s*[:=]\s*['\"]?half\b", re.I),
    ),
    ("bf16", re.compile(rf"\b(?:bf16|bfloat16){_IS_ON}", re.I)),
    ("fp32", re.compile(r"\b(?:fp32|float32)\b", re.I)),
)
_VOCABULARY = re.compile(r"vocab(?:ulary)?[_ ]?size['\"]?\s{0,24}[:=]?\s{0,24}(\d[\d,]*)", re.I)
# A head for speech is always new, as are all weights of a model from scratch.
_FROM_SCRATCH = re.compile(r"from scratch|\blm loss\b|consumed samples|\bctc\b|\bwer\b|wav2vec", re.I)


def about_run(text: str) -> About:
    """Gather what can be told from the first pages of a log."""
    head = text[:200_000]
    sizes = [int(size.replace(",", "")) for size in _VOCABULARY.findall(head)]
    return About(
        vocab_size=max((size for size in sizes if size > 1), default=None),
        device="mps" if _APPLE.search(head) or (_MAC.search(head) and not _NVIDIA.search(head)) else None,
        precision=next((name for name, pattern in _PRECISIONS if pattern.search(head)), None),
        is_from_scratch=bool(_FROM_SCRATCH.search(head)),
        is_raw=False,
    )
