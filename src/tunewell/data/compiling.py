"""Make of a plan the ids that never change and the stretches that must be encoded for each row."""

from collections.abc import Callable, Mapping, Sequence

from tunewell.data.items import Compiled, Fixed, Open, Place
from tunewell.data.masking import Piece, Plan
from tunewell.data.stand_ins import NO_TRIM
from tunewell.data.tokenizer import AddedFacts, LoadedTokenizer


def compile_plan(
    plan: Plan, added: Mapping[str, AddedFacts], encode_once: Callable[[Open], list[Fixed] | None]
) -> Compiled:
    """Cut a plan at its markers; `encode_once` gives the ids of a stretch without words, None to leave it open."""
    items: list[Fixed | Open] = []
    run: list[Piece] = []
    strips = False
    for piece in [*plan.pieces, None]:
        if piece is not None and not piece.is_marker:
            run.append(piece)
            continue
        marker = added[piece.text] if piece is not None else None
        if run:
            stretch = Open(
                [(part.text, part.slot, part.is_learned) for part in run],
                plan.trims,
                place=Place(not items, marker is None),
                strip_left=strips,
                strip_right=marker is not None and marker.lstrip,
            )
            has_words = any(part.slot >= 0 for part in run)
            ids = None if has_words else encode_once(stretch)
            items += [stretch] if ids is None else ids
            run = []
        if piece is not None and marker is not None:
            items.append(Fixed([marker.id], piece.is_learned))
            strips = marker.rstrip
    return Compiled(_merged(items), sum(piece.is_marker and piece.is_learned for piece in plan.pieces))


def compile_plain_text(tokenizer: LoadedTokenizer) -> Compiled:
    """Frame a text that needs no template by the tokens that begin and end one."""
    special, added = tokenizer.special_tokens, tokenizer.added
    bos, eos = special.get("bos_token"), special.get("eos_token")
    begin = [added[bos].id] if tokenizer.adds_bos and bos in added else []
    end = [added[eos].id] if eos in added else []
    hole = Open([("", 0, True)], [NO_TRIM], place=Place(not begin, not end))
    return Compiled([Fixed(begin, True), hole, Fixed(end, True)], len(end))


def _merged(items: Sequence[Fixed | Open]) -> list[Fixed | Open]:
    merged: list[Fixed | Open] = []
    for item in items:
        last = merged[-1] if merged else None
        if isinstance(item, Fixed) and isinstance(last, Fixed) and item.is_learned == last.is_learned:
            last.ids.extend(item.ids)
        else:
            merged.append(Fixed(list(item.ids), item.is_learned) if isinstance(item, Fixed) else item)
    return merged
