"""`tunewell export`: from a run to folders and files that others load, each proven to be the model that was trained."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.presets import is_preset
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.text_pipeline import TextPipeline
from tunewell.export.card import card_facts, model_card
from tunewell.export.disk_space import estimate_disk_space, require_disk_space
from tunewell.export.existing import find_existing
from tunewell.export.files import ArtefactWriter
from tunewell.export.gguf.architecture import can_write
from tunewell.export.preflight import require_proof_tools, require_writable
from tunewell.export.proof.record import check_merge, make_reference, with_artefacts, with_rounded
from tunewell.export.request import KINDS, ExportOptions, ollama_name
from tunewell.export.staging import copy_kept, forget_failed, keep_failed, open_staging, publish
from tunewell.hardware.threads import torch_threads
from tunewell.inference.chat_model import open_chat_model
from tunewell.inference.model_ref import ModelRef
from tunewell.records.parity import PARITY, PROOF, REFERENCE, Artefact, Parity, Proof, write_record
from tunewell.records.report import Report
from tunewell.runs.resolve import resolve_model

EXIT_NOT_PROVEN = 4


@dataclass(frozen=True)
class Exported:
    """What was made, and its proof."""

    folder: Path
    parity: Parity
    artefacts: list[Artefact]
    notes: list[str]
    next_command: str
    exit_code: int = 0
    created: str | None = None
    """The name under which Ollama has it."""

    def as_json(self) -> dict[str, Any]:
        """Give the object that `export --json` prints."""
        return {
            "folder": str(self.folder),
            "is_proven": self.parity.is_ok,
            "artefacts": [artefact.model_dump() for artefact in self.artefacts],
            "links": [link.model_dump() | {"is_ok": link.is_ok} for link in self.parity.links],
            "notes": self.notes,
            "ollama": self.created,
            "next": self.next_command,
        }


def export(
    place: str | Path | None = None,
    *,
    order: ExportOptions | None = None,
    progress: ProgressListener = silent,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> Exported:
    """Make what was ordered, prove it in a process of its own, and only then give it the name of a finished export.

    `options` are fields of the order: `export("run", to="gguf", gguf="q8_0,q4_k_m")`. An export that lies in the
    folder already is added to; of it only what is made again is replaced. `announce` is told what will be written,
    before it is. Raises UserError for what cannot be made, before anything is written, and for what cannot be tried.
    What is made and not proven is removed again; the result then says which link of the chain broke, with exit code 4.
    """
    order = replace(order or ExportOptions(), **options).checked()
    tell = progress
    base = None if order.base is None else str(order.base)
    found = resolve_model(place, checkpoint=str(order.checkpoint), base=base, sets=order.sets)
    wanted, kinds, precision = _wishes(order, found)
    out = Path(order.out or ((found.path or Path.cwd()) / "export")).expanduser().resolve()
    standing = find_existing(out, wanted, kinds)
    require_proof_tools({*wanted, *(own.kind for own in standing.kept)} if standing else wanted)
    tell(Progress("loading the trained model"))
    voice = open_chat_model(found, device="cpu", allow_pickle=order.allow_pickle, precision="fp32", backend="plain")
    has_gguf = bool({"gguf", "ollama"} & set(wanted))
    if has_gguf:
        can_write(voice.model.config.to_dict())
    with ExitStack() as held:
        held.enter_context(torch_threads(voice.num_threads))
        shop = held.enter_context(open_staging(out))
        staged = shop.staged
        room = estimate_disk_space(staged, voice, wanted, kinds, precision)
        require_disk_space(room, out)
        (announce or (lambda words: tell(Progress(words))))(str(room))
        proof, reference = make_reference(voice, tell)
        if standing is not None:
            standing.refuse_other(proof, reference)
            copy_kept(standing, staged)
        facts = card_facts(found, voice)
        text = TextPipeline.load(found.loaded)
        maker = ArtefactWriter(voice, text, staged, proof.stop_ids, facts, precision, tell)
        if has_gguf:
            own, for_ollama = voice.model.config.to_dict(), "ollama" in wanted
            require_writable(own, tokenizer=text.tokenizer, template=maker.template, for_ollama=for_ollama)
        artefacts = list(standing.kept) if standing else []
        if "adapter" in wanted:
            artefacts.append(maker.adapter())
        if set(wanted) & {"merged", "gguf", "ollama"}:
            tell(Progress("merging"))
            if voice.adapter is not None:
                voice.adapter.merge()
            check_merge(voice, proof, reference)
            if "merged" in wanted:
                artefacts.append(maker.merged())
            if has_gguf:
                artefacts += maker.ggufs(kinds)
                tell(Progress("measuring what rounding makes of it"))
                reference = with_rounded(reference, voice, staged, artefacts)
            if "ollama" in wanted:
                artefacts.append(maker.ollama())
        reference.save(staged / REFERENCE)
        (staged / "README.md").write_text(model_card(facts, kind="export"), encoding="utf-8")
        told = [*_verdict_notes(facts.report), *(standing.notes if standing else [])]
        older: list[str] = standing.proof.notes if standing and standing.kept else []
        notes = list(dict.fromkeys([*maker.notes, *older]))
        artefacts.sort(key=lambda own: KINDS.index(own.kind))
        proof = with_artefacts(proof, staged, artefacts, notes=notes, license=facts.license)
        write_record(staged / PROOF, proof)
        del voice, maker
        parity = _prove(staged, tell, *(["--allow-pickle"] if order.allow_pickle else []))
        if not parity.is_ok:
            failed = keep_failed(out, parity)
            words = f"what was made is not what was trained, and was removed; `{failed}` has the figures"
            return Exported(out, parity, artefacts, [*told, *proof.notes, words], "", EXIT_NOT_PROVEN)
        publish(shop, out, standing)
    forget_failed(out)
    done = _done(out, parity, proof, order, found.path or out)
    return replace(done, notes=[*told, *done.notes])


def _wishes(order: ExportOptions, found: ModelRef) -> tuple[list[str], list[str], str]:
    """Say what is to be made: kinds of artefacts, kinds of GGUF files, and the precision of merged weights."""
    settings = found.loaded.config.export
    is_rootless = found.base is not None and is_preset(found.base)
    default = ("gguf",) if order.gguf else ("adapter",) if found.adapter and not is_rootless else ("merged",)
    wanted = list(dict.fromkeys(order.to or settings.to or default))
    if order.gguf and not {"gguf", "ollama"} & set(wanted):
        wanted.append("gguf")
    if "adapter" in wanted and found.adapter is None:
        raise UserError("there is no adapter: the whole model was trained", fix="export `merged` or `gguf`")
    if "adapter" in wanted and is_rootless:
        raise UserError(
            f"nobody could put the adapter on `{found.base}`, which starts from nothing and has no files",
            fix="export `merged` or `gguf`",
        )
    return wanted, list(dict.fromkeys(order.gguf or settings.gguf)), order.precision or settings.precision


def _verdict_notes(report: Report | None) -> list[str]:
    """Say of a run that was judged badly that a proof is no better verdict."""
    if report is None or report.verdict not in ("FAIL", "WEAK"):
        return []
    return [f"the verdict of the run is {report.verdict}: {report.summary}; proven is what it is, not that it is good"]


def _done(out: Path, parity: Parity, proof: Proof, order: ExportOptions, run: Path) -> Exported:
    kinds = {artefact.kind for artefact in proof.artefacts}
    created = None
    shown = _from_here(out)
    notes = list(proof.notes)
    next_command = shlex.join(["tunewell", "verify", str(shown)])
    if "ollama" in kinds:
        name = order.name or ollama_name(run.resolve().name)
        line = ["ollama", "create", name, "-f", "Modelfile"]
        next_command = f"cd {shlex.quote(str(shown / 'ollama'))} && {shlex.join(line)} && ollama run {name}"
        if order.creates and shutil.which("ollama"):
            done = subprocess.run(line, cwd=out / "ollama", capture_output=True, text=True, check=False)
            if done.returncode == 0:
                created, next_command = name, f"ollama run {name}"
            else:
                notes.append(f"`ollama create` failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    elif "gguf" in kinds:
        file = next(artefact.path for artefact in proof.artefacts if artefact.kind == "gguf")
        next_command = shlex.join(["tunewell", "chat", str(shown / file)])
    return Exported(shown, parity, proof.artefacts, notes, next_command, created=created)


def _from_here(path: Path) -> Path:
    """Shorten a path that lies below the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _prove(staged: Path, tell: ProgressListener, *flags: str) -> Parity:
    """Let a new process prove what lies on disk: nothing that is in this one's memory can help it."""
    tell(Progress("proving, in a process of its own"))
    line = [sys.executable, "-m", "tunewell", "verify", str(staged), "--json", *flags]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"CI": "1"})
    if not (staged / PARITY).is_file():
        said = _error_of(done.stdout)
        where = f"`{shlex.join(line[1:])}` ended with {done.returncode}"
        raise UserError(
            f"the proof could not be made: {said['what']}" if said else "the proof could not be made",
            where=(said or {}).get("where") or where,
            fix=(said or {}).get("fix"),
        )
    return Parity.model_validate(json.loads((staged / PARITY).read_text(encoding="utf-8")))


def _error_of(printed: str) -> dict[str, Any] | None:
    """Read what a command printed with `--json` where it could not do its work."""
    try:
        return json.loads(printed)["error"]
    except (ValueError, KeyError, TypeError):
        return None
