"""Let the base model answer the everyday prompts of the replay, once per machine (see `data/replay.py`)."""

from pathlib import Path
from zipfile import ZipFile

from tunewell.core.cache import DiskCache
from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_text, sha256_text, stable_json, write_atomic
from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.data.read_ahead import ReadAhead
from tunewell.data.replay import ANSWER_TOKENS, MAX_TOKENS, Replayed, WithReplay, replay_prompts
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import corpus_stop_ids
from tunewell.inference.degeneration import find_degeneration
from tunewell.inference.generate import generate
from tunewell.inference.prompt import prompt_ids
from tunewell.models.base_content import read_content
from tunewell.training.build import RunInputs
from tunewell.training.events import Note
from tunewell.training.run import Run

REPLAY = "replay.json"
"""The replayed documents of a run, in its folder: a resumed run has the same."""
_CACHE = DiskCache("replay", max_entries=64)


def add_replay(parts: RunInputs, run: Run) -> None:
    """Add the replayed documents to those of the run, if its order has some. Rank 0 answers the prompts."""
    planned = parts.plan.replay
    if not run.order.num_replayed:
        if planned is not None and not planned.value and parts.config.train.replay not in ("auto", 0):
            run.listener(Note(f"no replay: {planned.because}"))
        return
    with parts.world.failing_together():
        replay = _replayed(parts, run) if parts.world.is_first else []
    documents = WithReplay(parts.hooks.documents(parts.corpus), parts.world.broadcast(replay))
    run.documents = ReadAhead(documents) if run.config.train.read_ahead else documents
    number = count(run.order.num_drawn, "everyday prompt")
    run.listener(Note(f"replay: an epoch has {number} with the base model's own answers"))


def _shipped(key: object) -> list[Replayed]:
    """Return the answers that are shipped for this base model, prompts and stop tokens; none for another."""
    with ZipFile(Path(__file__).with_name("replay.zip")) as archive:
        name = f"{sha256_text(stable_json(key))[:32]}.json"
        return parse_json(archive.read(name)) if name in archive.namelist() else []


def _replayed(parts: RunInputs, run: Run) -> list[Replayed]:
    """Return the replayed documents: those of the run folder, of an earlier run on this machine, or new ones."""
    path = parts.folder / REPLAY
    if path.is_file():
        return parse_json(read_text(path))
    text = TextPipeline.load(parts.loaded)
    masker, quantized = text.chat_masker(parts.config.data.sources), parts.plan.quantized
    assert masker is not None  # the plan has no replay without a template
    encoder, stop_ids = text.encoder(masker), corpus_stop_ids(text.tokenizer, parts.corpus.manifest)
    prompts = [prompt_ids(masker, encoder, [{"role": "user", "content": asked}]) for asked in replay_prompts()]
    base = read_content(parts.model).model_dump()
    key = [base, quantized and quantized.model_dump(exclude={"because"}), prompts, stop_ids]
    found: list[Replayed] = _CACHE.read(key) or _shipped(key)
    if not found and run.progress.step:
        raise UserError("the replayed documents of the run are lost", where=str(path), fix="start a new run")
    if not found:
        run.listener(Progress("the base model answers everyday prompts"))
        learner = run.learner
        answers = generate(
            learner.model, prompts, max_new_tokens=ANSWER_TOKENS, stop_ids=stop_ids, before_token=learner.heartbeat
        )
        end, decode = text.tokenizer.backend.token_to_id(masker.frame.end_marker), text.tokenizer.backend.decode
        for asked, prompt, done in zip(replay_prompts(), prompts, answers, strict=True):
            ids = [*done.ids, end] if done.ended and end is not None else done.ids  # one that is cut off has no end
            spelled = decode(done.ids)
            if ids and not find_degeneration(spelled, ids=done.ids, ended=done.ended, question=asked, reference=""):
                found.append((prompt, ids[: MAX_TOKENS - len(prompt)]))
        _CACHE.write(key, found)
    if not found:
        what = "the base model gives no sound answer to an everyday prompt"
        raise UserError(what, fix="set `train.replay: 0`: it has nothing to keep")
    write_atomic(path, stable_json(found))
    return found
